"""A KV connector for vLLM (0.32): KV cache on NVMe, found again after a restart.

    --kv-transfer-config '{"kv_connector": "RipienoConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ripieno.vllm",
        "kv_connector_extra_config": {"path": "/var/lib/kv", "capacity": "100GiB"}}'

The scheduler's process has the catalog, and decides. Each worker's process has a plane, and does as
it is told. What passes between them is vLLM's connector metadata, each step.

Options (kv_connector_extra_config):
- path: a directory on a local file system with direct I/O.
- capacity: bytes on the disk for all ranks, such as "100GiB"; allocated at once.
- devices: files of each rank, each with a software controller. 1.
- load_async: load between steps, instead of layer by layer in the step that needs the blocks.
- save_decode: store what was generated, too. true.
- weights_id: what tells the weights from others of the same model name and revision.
"""

import hashlib
import json
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs, group_kernel_blocks
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import ripieno

# vLLM shows what is logged below its own name.
logger = init_logger("vllm.ripieno")

KEY_BYTES = 32
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
OPTIONS = {"path", "capacity", "devices", "load_async", "save_decode", "weights_id"}


def parse_bytes(text):
    """Bytes that a number, or text such as "100GiB", means."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B?", str(text).strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f'capacity: {text!r} was given; give bytes, or a size such as "100GiB"')
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class Job:
    """Blocks to be moved. Each worker gets the same."""

    id: int
    request: str
    files: list[int]
    blocks: list[int]
    checksums: list[bytes] = field(default_factory=list)
    """Loads: of each rank."""
    is_async: bool = False


@dataclass
class Tasks(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after a step."""

    loaded: Counter = field(default_factory=Counter)
    """How many workers have ended each load."""
    lost: set[int] = field(default_factory=set)
    """Files that could not be read."""
    written: dict[int, dict[int, bytes | None]] = field(default_factory=dict)
    """By save and rank: its checksums, or None where it failed."""
    dead: str | None = None
    """Why a worker's plane does nothing any more."""

    def aggregate(self, other):
        written = {job: dict(ranks) for job, ranks in self.written.items()}
        for job, ranks in other.written.items():
            written.setdefault(job, {}).update(ranks)
        dead = self.dead or other.dead
        return Reports(self.loaded + other.loaded, self.lost | other.lost, written, dead)

    def __bool__(self):
        return bool(self.loaded or self.lost or self.written or self.dead)


@dataclass(frozen=True)
class Row:
    """Where a layer's pages are: page of block b at offset + b * stride."""

    layer: str
    offset: int
    stride: int
    bytes: int


def rows_of(config):
    """The rows of the KV cache, in the order of the layers."""
    specs = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = group.kv_cache_spec
            is_mixed = isinstance(spec, UniformTypeKVCacheSpecs)
            specs[name] = spec.kv_cache_specs[name] if is_mixed else spec
    rows = []
    for tensor in config.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            if not isinstance(specs[name], AttentionSpec):
                raise ValueError(f"layer {name} has {specs[name]}; only attention can be stored")
            offset = tensor.offset + at * tensor.layer_stride
            size = specs[name].unpadded_page_size_bytes
            rows.append(Row(name, offset, tensor.block_stride, size))
    if len({(row.bytes, row.stride) for row in rows}) != 1:
        raise ValueError("the layers' pages have different sizes; they can not be stored together")
    return rows


class RipienoConnector(KVConnectorBase_V1):
    """See the module's documentation."""

    _cache_hit_source = CacheHitSource.DISK

    @property
    def requires_kv_delivery(self):
        # What is not stored is computed again.
        return False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        if unknown := set(options) - OPTIONS:
            raise ValueError(
                f"kv_connector_extra_config: {', '.join(sorted(unknown))} is unknown; there are "
                f"{', '.join(sorted(OPTIONS))}"
            )
        if missing := {"path", "capacity"} - set(options):
            raise ValueError(f"kv_connector_extra_config: {', '.join(sorted(missing))} is missing")
        _check(vllm_config, kv_cache_config)
        self.load_async = bool(options.get("load_async", False))
        self.save_decode = bool(options.get("save_decode", True))
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size = spec.block_size
        # Several hashes a block: the last one closes it.
        self.hashes = self.block_size // (kv_cache_config.hash_block_size or self.block_size)
        self.rows = rows_of(kv_cache_config)
        self.shape = ripieno.Shape(len(self.rows), 1, self.rows[0].bytes, self.block_size)
        parallel = vllm_config.parallel_config
        self.world = parallel.world_size
        # What the files' layout depends on. All else is in the namespace.
        name = f"tp{self.world}-layers{len(self.rows)}-page{self.rows[0].bytes}"
        name += f"-block{self.block_size}"
        if parallel.data_parallel_size > 1:
            name += f"-dp{parallel.data_parallel_rank}"
        self.path = os.path.join(options["path"], name)
        # Workers are started before the scheduler; whoever comes first makes it.
        self.ranks = ripieno.prepare(
            self.path,
            self.shape,
            ranks=self.world,
            capacity=parse_bytes(options["capacity"]),
            devices=int(options.get("devices", 1)),
        )
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(self, _namespace(vllm_config, kv_cache_config, options))
        else:
            self._worker = None

    # In the scheduler's process.

    def on_new_request(self, request):
        self._scheduler.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._scheduler.tasks(scheduler_output)

    def update_connector_output(self, connector_output):
        reports = connector_output.kv_connector_worker_meta
        if reports is not None:
            self._scheduler.reported(reports, connector_output.invalid_block_ids)

    def request_finished(self, request, block_ids):
        self._scheduler.forget(request.request_id)
        return False, None

    def reset_cache(self):
        self._scheduler.reset()
        return True

    # In a worker's process.

    def register_kv_caches(self, kv_caches):
        self._worker = Worker(self, kv_caches)

    def start_load_kv(self, forward_context, **kwargs):
        self._worker.begin(self._get_connector_metadata())
        # Without layers' hooks (a FULL graph, or no forward pass): before everything else.
        if not forward_context.attn_metadata:
            self._worker.finish_loads()

    def wait_for_layer_load(self, layer_name):
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._worker.save_layer(layer_name)

    def wait_for_save(self):
        self._worker.finish_loads()
        self._worker.finish_saves()

    def get_finished(self, finished_req_ids):
        return None, self._worker.finished()

    def get_block_ids_with_load_errors(self):
        return self._worker.take_invalid()

    def build_connector_worker_meta(self):
        return self._worker.take_reports()

    def shutdown(self):
        if self._role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        elif self._worker is not None:
            self._worker.close()


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


class Worker:
    """Moves blocks between the KV cache and its files."""

    def __init__(self, connector, kv_caches):
        self.rank = connector._vllm_config.parallel_config.rank
        self.layers = {row.layer: at for at, row in enumerate(connector.rows)}
        self.pages, pool = _register(connector, kv_caches)
        rank = connector.ranks[self.rank]
        self.plane = ripieno.Plane(connector.path, rank, connector.shape, pool)
        self.tasks = Tasks()
        self.loading = []
        """Loads of this step: task and plane's job."""
        self.waited = set()
        self.saving = None
        """Saves of this step, once the first layer was saved."""
        self.saved = set()
        self.pending = []
        """Loads between steps: task, plane's job, and layers in flight."""
        self.refused = set()
        """Requests whose load between steps could not begin."""
        self.invalid = set()
        self.reports = Reports()
        logger.info(
            "ripieno: rank %d: %d layers of %d blocks of %d bytes%s",
            self.rank,
            len(self.layers),
            pool.blocks,
            connector.shape.object_bytes,
            ", copied by the CPU" if self.plane.is_bounced else "",
        )

    def begin(self, tasks):
        """Starts all loads: the first layers of all requests come first."""
        self.tasks, self.loading, self.saving = tasks, [], None
        self.waited, self.saved = set(), set()
        for load in tasks.loads:
            try:
                job = self.plane.begin_load(
                    load.files, load.blocks[: len(load.files)], load.checksums[self.rank]
                )
            except ripieno.Error as error:
                self._load_ended(load, str(error))
                if load.is_async:
                    self.refused.add(load.request)
            else:
                if load.is_async:
                    self.pending.append((load, job, list(self.layers.values())))
                else:
                    self.loading.append((load, job))
        between = [(load, job) for load, job, _ in self.pending if load in tasks.loads]
        for layer in self.layers.values():
            for _, job in self.loading + between:
                self._attempt(self.plane.start, job, layer)

    def _attempt(self, act, job, layer):
        try:
            return act(job, layer)
        except ripieno.Error:
            # The job says it when it ends.
            return True

    def wait_layer(self, name):
        layer = self.layers[name]
        if layer not in self.waited:
            self.waited.add(layer)
            for _, job in self.loading:
                self._attempt(self.plane.wait, job, layer)

    def finish_loads(self):
        """Ends this step's loads."""
        loading, self.loading = self.loading, []
        self._end_loads(loading)

    def _end_loads(self, loads):
        if not loads:
            return
        ended = self._end([job for _, job in loads])
        for load, job in loads:
            self._load_ended(load, ended[job][0])
        self.reports.lost.update(self.plane.take_lost())

    def _end(self, jobs):
        """By job: why it failed, or None; and its checksums."""
        try:
            return {report.job: (report.error, report.checksums) for report in self.plane.end(jobs)}
        except ripieno.Error as error:
            self.reports.dead = str(error)
            return dict.fromkeys(jobs, (str(error), None))

    def _load_ended(self, load, error):
        self.reports.loaded[load.id] += 1
        bad = load.blocks[len(load.files) :]
        if error is not None:
            logger.warning("ripieno: %s: %s", load.request, error)
            bad = load.blocks
        self.invalid.update(bad)
        for page in self.pages if bad else ():
            # Whatever is there might be no numbers at all.
            page[bad] = 0

    def save_layer(self, name):
        self._save(self.layers[name])

    def _save(self, layer):
        if layer in self.saved:
            return
        self.saved.add(layer)
        if self.saving is None:
            self.saving = []
            for save in self.tasks.saves:
                try:
                    job = self.plane.begin_store(save.files, save.blocks)
                except ripieno.Error as error:
                    logger.warning("ripieno: %s: %s", save.request, error)
                    job = None
                self.saving.append((save, job))
        for _, job in self.saving:
            if job is not None:
                self._attempt(self.plane.start, job, layer)

    def finish_saves(self):
        """When this returns, the blocks may be changed."""
        if not self.tasks.saves:
            return
        for layer in self.layers.values():
            # Those without a hook.
            self._save(layer)
        jobs = [job for _, job in self.saving if job is not None]
        ended = self._end(jobs)
        for save, job in self.saving:
            error, checksums = ended.get(job, (None, None))
            if error is not None:
                logger.warning("ripieno: %s: %s", save.request, error)
            # What was computed from blocks that failed to load is wrong.
            if error is not None or self.invalid:
                checksums = None
            self.reports.written.setdefault(save.id, {})[self.rank] = checksums
        self.tasks, self.saving = Tasks(), None

    def finished(self):
        """Requests whose loads between steps have ended."""
        done, rest = [], []
        for load, job, layers in self.pending:
            left = [layer for layer in layers if not self._attempt(self.plane.poll, job, layer)]
            if left:
                rest.append((load, job, left))
            else:
                done.append((load, job))
        self.pending = rest
        self._end_loads(done)
        refused, self.refused = self.refused, set()
        return {load.request for load, _ in done} | refused

    def take_invalid(self):
        invalid, self.invalid = self.invalid, set()
        return invalid

    def take_reports(self):
        reports, self.reports = self.reports, Reports()
        return reports or None

    def close(self):
        try:
            logger.info("ripieno: rank %d: %s", self.rank, self.plane.stats())
            self.plane.close()
        except ripieno.Error as error:
            logger.error("ripieno: rank %d: %s", self.rank, error)


def _check(vllm_config, kv_cache_config):
    """Refuses what can not be stored, or not be found again."""
    layout = KVCacheLayout[kv_cache_config.kv_cache_layout]
    if not layout.is_block_compact:
        raise ValueError(f"KV cache layout {layout.name}: a block's page has gaps; use another one")
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        raise ValueError(
            f"the model has {groups} KV cache groups, and one can be stored; "
            "set --disable-hybrid-kv-cache-manager"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("pipeline parallelism: ranks have other layers each; it can not be stored")
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ValueError(
            f"prefix_caching_hash_algo is {algorithm}: its hashes differ after a restart, and "
            "nothing would be found; use sha256_cbor, or set PYTHONHASHSEED"
        )


def _namespace(vllm_config, kv_cache_config, options):
    """Everything that changes bytes and is not in vLLM's hashes."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights = [model.model, model.revision, options.get("weights_id", ""), str(model.quantization)]
    layout = {
        "layout": kv_cache_config.kv_cache_layout,
        "backend": str(vllm_config.attention_config.backend),
        "hash": cache.prefix_caching_hash_algo,
        "seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    return ripieno.Namespace(
        weights=hashlib.sha256(json.dumps(weights).encode()).digest(),
        layout=json.dumps(layout, sort_keys=True),
        dtype=f"{model.dtype} {cache.cache_dtype}",
        block_tokens=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        label=os.path.basename(model.model)[:64],
    )


def _register(connector, kv_caches):
    """The KV cache as bytes, [block, byte] of each layer; and the pool."""
    config = connector._kv_cache_config
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kv_caches.values()}
    ((base, tensor),) = storages.items() if len(storages) == 1 else [(0, None)]
    if tensor is None or tensor.device.type != "cpu":
        where = tensor.device if tensor is not None else f"{len(storages)} allocations"
        raise ValueError(f"the KV cache is on {where}; one allocation on the CPU can be stored")
    pages = []
    for row in connector.rows:
        cache = group_kernel_blocks(kv_caches[row.layer], config.num_blocks)
        found = cache.data_ptr() - base, cache.stride(0) * cache.element_size()
        if found != (row.offset, row.stride):
            raise ValueError(
                f"layer {row.layer} is at offset {found[0]} with stride {found[1]}; vLLM promised "
                f"{row.offset} and {row.stride}"
            )
        page = torch.tensor([], dtype=torch.uint8)
        size, stride = (config.num_blocks, row.bytes), (row.stride, 1)
        pages.append(page.set_(tensor.untyped_storage(), row.offset, size, stride))
    pool = ripieno.Pool(
        address=base,
        length=tensor.untyped_storage().nbytes(),
        rows=[row.offset for row in connector.rows],
        block_stride=connector.rows[0].stride,
        blocks=config.num_blocks,
        owner=tensor,
    )
    return pages, pool
