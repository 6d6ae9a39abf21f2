"""The scheduler's half: what is loaded and stored, and in which files."""

import hashlib
import threading

from vllm.logger import init_logger

import ripieno

from .protocol import Job, Tasks

# vLLM shows what is logged below its own name.
logger = init_logger("vllm.ripieno")

KEY_BYTES = 32


class Scheduler:
    """Decides what is loaded and stored, and in which files."""

    def __init__(self, connector, namespace):
        self.block_size = connector.block_size
        self.hashes = connector.hashes
        self.load_async = connector.load_async
        self.save_decode = connector.save_decode
        self.world = connector.world
        self.cache = connector
        self.catalog = ripieno.Catalog(connector.path)
        self.namespace = self.catalog.namespace(namespace)
        self.requests = {}
        self.asked = {}
        """By request: blocks it has without us, as it was last asked for."""
        self.saved = {}
        """By request: blocks that were offered to the store."""
        self.planned = {}
        """By request: a load for the next step: reference and blocks."""
        self.loads = {}
        """By job: reference, request, and workers that have not ended it."""
        self.saves = {}
        """By job: the write."""
        self.jobs = 0
        self.dead = None
        """Why nothing is found and stored any more."""
        self.read_only = False
        self.dirty, self.stopped = threading.Event(), False
        self.syncer = threading.Thread(target=self._sync, name="ripieno", daemon=True)
        self.syncer.start()
        found = self.catalog.usage(self.namespace)["stored"]
        logger.info("ripieno: %d blocks are stored in %s", found, connector.path)

    def _keys(self, request, first, last):
        hashes = request.block_hashes
        closing = range((first + 1) * self.hashes - 1, last * self.hashes, self.hashes)
        keys = [bytes(hashes[at]) for at in closing if at < len(hashes)]
        if keys and len(keys[0]) != KEY_BYTES:
            return [hashlib.sha256(key).digest() for key in keys]
        return keys

    def matched(self, request, computed):
        """Called often, also for a request that goes on waiting: has no effect."""
        first = computed // self.block_size
        self.asked[request.request_id] = first
        # At least one token has to be computed.
        last = (request.num_tokens - 1) // self.block_size
        if last <= first or self.dead:
            return 0, False
        found = self.catalog.lookup(self.namespace, self._keys(request, first, last))
        return found * self.block_size, bool(found) and self.load_async

    def allocated(self, request, blocks, tokens):
        """The second call for a load between steps has no tokens."""
        self.requests[request.request_id] = request
        if tokens == 0:
            return
        (ids,) = blocks.get_block_ids()
        first = self.asked[request.request_id]
        last = first + tokens // self.block_size
        found = self.catalog.acquire(self.namespace, self._keys(request, first, last))
        self.planned[request.request_id] = (found, ids[first:last])

    def tasks(self, output):
        tasks = Tasks()
        for name, (found, blocks) in self.planned.items():
            self.jobs += 1
            self.loads[self.jobs] = [found.id, name, self.world]
            # What was evicted since the lookup has no file: the workers report it.
            checksums = [self.catalog.checksums(found.files, r) for r in range(self.world)]
            job = Job(self.jobs, name, found.files, blocks, checksums, self.load_async)
            tasks.loads.append(job)
        self.planned.clear()
        for name in output.preempted_req_ids or ():
            self.saved.pop(name, None)
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is not None:
                self._offer(request, tokens, output.kv_connector_block_state, tasks)
        return tasks

    def _offer(self, request, tokens, state, tasks):
        """Stores the blocks that this step fills."""
        name = request.request_id
        # This step's tokens are not counted yet.
        full = (request.num_computed_tokens + tokens) // self.block_size
        if not self.save_decode:
            full = min(full, request.num_prompt_tokens // self.block_size)
        full = min(full, len(request.block_hashes) // self.hashes)
        first = self.saved.get(name, 0)
        if full <= first or self.dead or self.read_only:
            return
        self.saved[name] = full
        write = self.catalog.begin(self.namespace, self._keys(request, first, full))
        if not write.files:
            self.catalog.abort(write.id)
            return
        ids = state.get_block_ids(name)[0]
        self.jobs += 1
        self.saves[self.jobs] = write.id
        blocks = [ids[first + at] for at in write.positions]
        tasks.saves.append(Job(self.jobs, name, write.files, blocks))

    def reported(self, reports, invalid):
        if invalid:
            self._evict(invalid)
        if reports.dead and not self.dead:
            self.dead = reports.dead
            logger.error("ripieno: serving goes on without the store: %s", self.dead)
        self.catalog.lost(sorted(reports.lost))
        for job, count in reports.loaded.items():
            load = self.loads[job]
            load[2] -= count
            if load[2] == 0:
                del self.loads[job]
                self.catalog.release(load[0])
        for job, ranks in reports.written.items():
            write, state = self.saves[job], None
            for rank, checksums in ranks.items():
                if checksums is None:
                    state = self.catalog.failed(write, rank)
                else:
                    state = self.catalog.written(write, rank, checksums)
            if state:
                self.catalog.commit(write)
            if state is not None:
                del self.saves[job]
                self.dirty.set()
        if reports.lost:
            self.dirty.set()

    def _evict(self, invalid):
        """vLLM computes blocks that failed to load again, but leaves their hashes in its cache
        meanwhile: another request would hit them."""
        manager = self.cache._kv_cache_manager
        for name in list(self.requests):
            (ids,) = manager.get_block_ids(name)
            at = next((at for at, block in enumerate(ids) if block in invalid), None)
            if at is not None:
                manager.evict_blocks(set(ids[at:]))
                self.saved.pop(name, None)

    def forget(self, name):
        self.requests.pop(name, None)
        self.saved.pop(name, None)
        self.asked.pop(name, None)
        if load := self.planned.pop(name, None):
            self.catalog.release(load[0].id)

    def reset(self):
        self.catalog.bump_epoch(self.namespace)
        self.dirty.set()

    def _sync(self):
        """Makes permanent what was committed, on a thread of its own."""
        while not self.stopped:
            self.dirty.wait()
            self.dirty.clear()
            try:
                self.catalog.sync()
            except ripieno.Error as error:
                self.read_only = True
                logger.error("ripieno: %s", error)
                return

    def close(self):
        self.stopped = True
        self.dirty.set()
        self.syncer.join()
        logger.info("ripieno: %s", self.catalog.usage(self.namespace))
        self.catalog.close()
