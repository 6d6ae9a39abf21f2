"""The scheduler's half: decides which blocks are loaded and stored, and in which files."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

import ripieno

from .adapters import Adapter, Adapters, is_other
from .cost import PROBE_SECONDS, PROMPT_TOKENS, Cost
from .events import Events
from .groups import Lookup, Places
from .history import History, Record
from .hints import ANSWERS, answer, stores
from .lookups import Asked, note
from .metrics import Stats
from .protocol import Ahead, Job, Tasks

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash, KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from . import RipienoConnector
    from .protocol import Reports

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")

MAX_CONSECUTIVE_FAILURES = 8
"""Consecutive failed loads after which the store is no longer used, and consecutive failed saves
after which nothing is stored."""

AGAIN_BLOCKS = 1024
"""Blocks of the engine before that a step announces."""

QUIET_SECONDS = 600.0
"""Minimum time between warnings of a slow store. The counter has all that is declined."""


def computes(output: SchedulerOutput) -> list[list[int]]:
    """Returns tokens to compute, and tokens before them, of each request of a step."""
    cached = output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return [[tokens, before[name]] for name, tokens in output.num_scheduled_tokens.items()]


class Watchers:
    """Callbacks for blocks that vLLM reuses. vLLM itself keeps one watcher per block, and there may
    be several connectors of ours."""

    _of: weakref.WeakKeyDictionary[BlockPool, Watchers] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.watchers: list[Callable[[KVCacheBlock], None]] = []

    @classmethod
    def of(cls, pool: BlockPool) -> Watchers:
        """Returns the watchers of a block pool."""
        return cls._of.setdefault(pool, cls())

    def reused(self, block: KVCacheBlock) -> None:
        for watcher in self.watchers:
            watcher(block)


@dataclass
class Load:
    """A load that some workers have not ended."""

    request: str
    reference: int
    blocks: int
    workers: int
    tokens: int
    wait_blocks: int
    """Blocks that it waits for: its own, and those of other loads at its beginning."""
    waited: float = 0.0
    """Seconds that it was waited for, at the slowest worker so far."""
    is_corrupted: bool = False
    """Set when blocks failed to load at a worker."""


@dataclass(frozen=True)
class Plan:
    """A load for the next step."""

    found: ripieno.Reference
    blocks: list[int]
    tokens: int
    trace: Mapping[str, str] | None
    """The trace headers of the request."""
    adapter: Adapter | None
    """The adapter that the workers must have, if the request has one."""


@dataclass
class Save:
    """A save that some workers have not ended."""

    request: str
    write: int
    blocks: list[int]
    prefix: list[int]
    """Blocks of the prefix it was computed from, including its own."""
    events: list[Record] = field(default_factory=list)
    is_wrong: bool = False
    """Set when the prefix failed to load, is from before a reset, or of another adapter."""
    adapter: Adapter | None = None
    """The adapter it was computed with."""


class Scheduler:
    """Decides which blocks are loaded and stored, and in which files."""

    def __init__(
        self,
        connector: RipienoConnector,
        describe: Callable[[str, str], ripieno.Namespace],
    ) -> None:
        """describe(adapter, tenant) returns the namespace for an adapter, by the digest of its
        files, or for none (""), and a tenant, or for all others ("")."""
        options = connector.options
        self.groups = connector.groups
        self.block_size = self.groups.tokens
        """Tokens of a unit: of a block, in all groups but those of smaller blocks."""
        self.load_async = connector.load_async
        self.options, self.world, self.cache = options, connector.world, connector
        self.ranks = connector.ranks
        self.backlog_max = max(1, int(options.save_backlog * connector.blocks))
        transfer = connector._vllm_config.kv_transfer_config
        self.loads_any, self.stores_any = transfer.is_kv_consumer, transfer.is_kv_producer
        self.place = connector.place
        self.catalog = self.place.open_catalog()
        self.describe = describe
        self.namespace = self.catalog.namespace(describe("", ""))
        self.spaces: dict[tuple[str, str], int | None] = {("", ""): self.namespace}
        """By digest of an adapter, and tenant: a namespace, or None if there is none."""
        for tenant in options.tenants:
            self.spaces["", tenant] = self.catalog.namespace(describe("", tenant))
        self._drop_changed()
        self.epoch = self.catalog.usage(self.namespace).epoch
        """Epoch of the weights, which a reset increments: odd after one in an engine's life."""
        self.adapters = Adapters()
        self.events = Events() if connector.has_events else None
        if self.events:
            self.place.take_dropped(self._all_spaces())
        self.announced_blocks: dict[bytes, tuple[int | None, ExternalBlockHash]] = {}
        """By key, with events of a hybrid model: the group and hash of a block."""
        kept = self.place.events_path if self.events else None
        self.history = History(kept, self._are_stored) if kept else None
        self.stats = Stats()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        """New requests, candidates for reading ahead."""
        self.announced: dict[str, int] = {}
        """By request that waits: its number."""
        self.numbers = 0
        """The last of these numbers."""
        self.asked: dict[str, Asked | str] = {}
        """By request: its last lookup, or why there was none."""
        self.cost = Cost(adds=not self.load_async)
        self.quiet_until = 0.0
        self._lookup: Lookup | None = None
        self.saved: dict[str, int] = {}
        """By request: number of units that were offered to the store."""
        self.told_behind: set[str] = set()
        """With events: requests that stored a block, so that all behind it are announced."""
        self.stale: set[str] = set()
        """Requests with blocks from before a reset of the store."""
        self.planned: dict[str, Plan] = {}
        """By request: a load for the next step."""
        self.loads: dict[int, Load] = {}
        self.saves: dict[int, Save] = {}
        """By job."""
        self.reading: dict[int, set[int]] = {}
        """By block: saves that read it."""
        self.watched: BlockPool | None = None
        """The block pool whose reused blocks are watched."""
        self.reused: set[int] = set()
        """Saves whose blocks vLLM reused."""
        self.backlog = 0
        """Blocks of pending saves."""
        self.jobs = self.stored = 0
        self.evicted = self.catalog.stats().evicted
        self.strikes: Counter[str] = Counter()
        self.last_work = time.monotonic()
        self.dead: str | None = None
        """The reason if the store is no longer used, else None."""
        self.read_only = False
        self.dirty, self.stopped = threading.Event(), False
        self.syncer = threading.Thread(target=self._sync, name="ripieno", daemon=True)
        self.syncer.start()
        found = sum(self.catalog.usage(space).stored for space in self._all_spaces())
        logger.info(
            "ripieno: %d blocks are stored in %s; a prompt is stored and found in units of %d tokens",
            found,
            self.place.path,
            self.block_size,
        )
        longest = connector._vllm_config.model_config.max_model_len
        if self.block_size > longest:
            logger.warning(
                "ripieno: nothing will be stored: a unit has %d tokens, and a request has at most "
                "%d; raise --max-model-len, or give a smaller --block-size if the model allows one",
                self.block_size,
                longest,
            )

    def _drop_changed(self) -> None:
        """Drops what an engine before stored after a reset: with weights that it changed in memory,
        and this one does not have. A server does so when an engine leaves."""
        for space in self._all_spaces() if self.options.server is None else ():
            if self.catalog.usage(space).epoch % 2:
                logger.info("ripieno: of other weights, and dropped: %s", self.catalog.usage(space))
                self.catalog.bump_epoch(space)

    def _space(self, request: Request) -> int | None:
        """Returns the namespace of a request; an adapter is identified by its files."""
        digest, tenant = name = self._space_name(request)
        if lora := request.lora_request:
            if not digest:
                return None
            if name not in self.spaces:
                self.spaces[name] = self._new_space(lora, digest, tenant)
        return self.spaces[name]

    def _space_name(self, request: Request) -> tuple[str, str]:
        """Returns the digest of a request's adapter, and the tenant."""
        digest = self.adapters.digest(request) if request.lora_request else ""
        return digest, self._tenant(request)

    def _new_space(self, lora: LoRARequest, digest: str, tenant: str) -> int | None:
        try:
            found = self.describe(digest, tenant)
            # A reset also applies to adapters that were not seen yet.
            return self.catalog.namespace(replace(found, adapter=f"{self.epoch} {digest}"))
        except ripieno.Error as error:
            logger.warning("ripieno: nothing of adapter %s is kept: %s", lora.lora_name, error)
            return None

    def _tenant(self, request: Request) -> str:
        """Returns the digest of a request's salt if it is a tenant's, else nothing."""
        if not (self.options.tenants and request.cache_salt):
            return ""
        digest = hashlib.sha256(request.cache_salt.encode()).hexdigest()
        return digest if digest in self.options.tenants else ""

    def _all_spaces(self) -> list[int]:
        """Returns all namespaces."""
        return sorted({space for space in self.spaces.values() if space is not None})

    def _known_space(self, request: Request) -> int:
        """Returns the namespace of a request that has one."""
        space = self._space(request)
        assert space is not None
        return space

    def arrived(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.adapters.arrived(request)
        if self.options.has_dram and self.options.is_paced:
            self.waiting.append(request)

    def _ahead(self, running: Collection[str], tasks: Tasks) -> None:
        """Announces new waiting requests, and withdraws those that run or are gone."""
        for name in [name for name in self.announced if name in running]:
            tasks.withdrawn.append((self.announced.pop(name), True))
        for name in [name for name in self.announced if name not in self.requests]:
            tasks.withdrawn.append((self.announced.pop(name), False))
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            name, last = request.request_id, (request.num_tokens - 1) // self.block_size
            is_wanted = name in self.requests and name not in running and last > 0
            if is_wanted and not self._unread(request):
                space = self._known_space(request)
                places = self.lookup.hit(request, 0, space)[1]
                keys = self.groups.keys(request, places)
                if files := self.place.files(space, keys):
                    checksums = [self.catalog.checksums(files, r) for r in range(self.ranks)]
                    self.numbers += 1
                    if name in self.announced:
                        tasks.withdrawn.append((self.announced[name], False))
                    self.announced[name] = self.numbers
                    # Each of those before it takes at least a step.
                    steps = len(self.announced)
                    tasks.ahead.append(Ahead(self.numbers, files, checksums, steps))

    def _unread(self, request: Request) -> str | None:
        """Returns the reason if the store is not read for a request, else None."""
        if not self.loads_any:
            return "kv_role is kv_producer"
        if self.dead:
            return f"the store is no longer used: {self.dead}"
        # Some want what is computed only, such as the logits of their prompt.
        if request.skip_reading_prefix_cache:
            return "it reads no cache"
        return None if self._space(request) is not None else "the files of its adapter changed"

    def matched(self, request: Request, computed: int) -> tuple[int, bool]:
        """Returns the tokens found. vLLM calls it often for a waiting request: it changes
        nothing in the store."""
        if computed > 0:
            self.adapters.hit(request)
        first = computed // self.block_size
        last = (request.num_tokens - 1) // self.block_size
        unread = self._unread(request)
        if last <= first and not unread:
            unread = f"it has no further unit of {self.block_size} tokens"
        if unread:
            # No lookup: it is not counted as one.
            self.asked[request.request_id] = unread
            return 0, False
        begun = time.time_ns()
        last, places = self.lookup.hit(request, first, self._known_space(request))
        tokens = (last - first) * self.block_size
        self.asked[request.request_id] = Asked(first, last, places, begun, time.time_ns())
        if tokens == 0 or self._declines(request, tokens, len(places)):
            return 0, False
        return tokens, self.load_async

    def _declines(self, request: Request, tokens: int, blocks: int) -> bool:
        """Returns True if a hit is to be computed, because loading it would take longer."""
        name, ahead, now = request.request_id, self._wait_blocks(), time.monotonic()
        if not self.cost.is_declined(name, tokens, blocks, ahead, now):
            return False
        if now >= self.quiet_until:
            self.quiet_until = now + QUIET_SECONDS
            logger.warning(
                "ripieno: %s: the store is slow: to load %d tokens would take %.3f s, to compute them "
                "takes %.3f s, so they are computed; a hit is loaded every %d s to see if it is fast "
                "again. vllm:ripieno_missed_tokens counts them",
                name,
                tokens,
                self.cost.load_seconds(blocks, ahead),
                self.cost.compute_seconds(tokens),
                PROBE_SECONDS,
            )
        return True

    def _wait_blocks(self) -> int:
        """Returns the blocks of loads in flight, and of those for the next step."""
        planned = sum(len(plan.blocks) for plan in self.planned.values())
        # Loads of a step end in it.
        begun = self.loads.values() if self.load_async else ()
        return planned + sum(load.blocks for load in begun)

    @property
    def lookup(self) -> Lookup:
        if self._lookup is None:
            # vLLM makes its cache's manager after the connector.
            manager = self.cache._kv_cache_manager
            self._lookup = Lookup(self.groups, manager, self.catalog)
        return self._lookup

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Plans a load. The second call for a load between steps has no tokens."""
        name = request.request_id
        self.requests[name] = request
        asked = self.asked.pop(name, None)
        if isinstance(asked, Asked):
            state_of = partial(self.place.state_of, self._known_space(request))
            note(asked, request, tokens, self.groups, state_of, self.stats)
        elif asked:
            logger.debug("ripieno: %s is not looked up: %s", name, asked)
        if tokens == 0:
            return
        assert isinstance(asked, Asked), "matched() came before"
        places = asked.places
        if isinstance(places, range):
            places = places[: tokens // self.block_size]
        into = self.groups.blocks_of(blocks.get_block_ids(), places)
        keys = self.groups.keys(request, places)
        space = self._known_space(request)
        found = self.catalog.acquire(space, keys)
        if self.events:
            # Each time: a router that was reset or came later knows them from here on.
            self._announce(self._described(request, places[: len(found.files)]))
        adapter = self.adapters.expected(request)
        self.planned[name] = Plan(found, into, tokens, request.trace_headers, adapter)

    def tasks(self, output: SchedulerOutput) -> Tasks:
        tasks = Tasks(is_idle=not output.num_scheduled_tokens)
        if self.options.layer_times:
            tasks.computes = computes(output)
        if max(output.num_scheduled_tokens.values(), default=0) >= PROMPT_TOKENS:
            tasks.tokens = sum(output.num_scheduled_tokens.values())
        self._ahead(self.planned.keys() | output.num_scheduled_tokens.keys(), tasks)
        if not tasks.is_idle:
            self.last_work = time.monotonic()
        wait_blocks = self._wait_blocks()
        for name, plan in self.planned.items():
            self.jobs += 1
            blocks = plan.blocks
            load = Load(name, plan.found.id, len(blocks), self.world, plan.tokens, wait_blocks)
            self.loads[self.jobs] = load
            # Blocks evicted since the lookup have no file: the workers report them. Blocks behind a
            # sliding window are vLLM's null block.
            files = [file for file, block in zip(plan.found.files, blocks, strict=False) if block]
            blocks = [block for block in blocks if block]
            checksums = [self.catalog.checksums(files, r) for r in range(self.ranks)]
            about = self.load_async, plan.tokens, plan.trace
            job = Job(self.jobs, name, files, blocks, checksums, *about, adapter=plan.adapter)
            tasks.loads.append(job)
        self.planned.clear()
        for name in output.preempted_req_ids or ():
            self.saved.pop(name, None)
            self.stale.discard(name)
        tasks.reused = sorted(self.reused & self.saves.keys())
        self.reused.clear()
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is not None:
                self._offer(request, tokens, output.kv_connector_block_state, tasks)
        self.adapters.end_step()
        return tasks

    def _full(self, request: Request, tokens: int) -> int:
        """Returns the number of a request's full units that are to be stored."""
        full = tokens // self.block_size
        if not self.options.save_decode:
            full = min(full, request.num_prompt_tokens // self.block_size)
        hashed: int = len(request.block_hashes) // self.groups.unit_hashes
        return min(full, hashed)

    def _offer(self, request: Request, tokens: int, state: Any, tasks: Tasks) -> None:
        """Stores the blocks that this step fills, and earlier ones for which there was no room."""
        name = request.request_id
        # num_computed_tokens does not include this step's tokens.
        full = self._full(request, request.num_computed_tokens + tokens)
        first, room = self.saved.get(name, 0), self.backlog_max - self.backlog
        full = min(full, first + room)
        if full <= first or name in self.stale or not self._may_store(request):
            return
        self.saved[name] = full
        ids = state.get_block_ids(name)
        places = self._kept(request, ids, full)
        space, keys = self._known_space(request), self.groups.keys(request, places)
        try:
            write = self._begin(space, keys, room)
        except ripieno.ReadOnlyError as error:
            self._fail(error)
            return
        before = self.groups.number_before(places, first)
        self.stats.count("dropped_blocks", len(places) - max(before, write.accepted))
        written = self.groups.chosen(places, write.positions)
        blocks = self.groups.blocks_of(ids, written)
        events: list[Record] = []
        if self.events and (name in self.told_behind or written):
            # Those behind a block that is stored now, too: an index forgets all below a block that
            # is gone, and does not get them back with it.
            told = before if name in self.told_behind else write.positions[0]
            events = self._described(request, places[told : write.accepted])
            self.told_behind.add(name)
        # vLLM's null block: behind a sliding window. Lookups cannot find the blocks after it.
        if not blocks or 0 in blocks:
            self.catalog.abort(write.id)
            if not blocks:
                self._tell_behind(name, events)
            return
        self.jobs += 1
        prefix, adapter = self.groups.blocks_of(ids, places), self.adapters.of.get(name)
        save = Save(name, write.id, blocks, prefix, adapter=adapter, events=events)
        self.saves[self.jobs] = save
        groups = [group for group, _ in written]
        tasks.saves.append(Job(self.jobs, name, write.files, blocks, groups=groups))
        self._watch(self.jobs, blocks)

    def _kept(self, request: Request, ids: Sequence[list[int]], last: int) -> Places:
        return self.groups.kept(request, ids, last, self.cache._kv_cache_manager.block_pool)

    def _may_store(self, request: Request) -> bool:
        is_able = self.stores_any and not (self.dead or self.read_only)
        return is_able and stores(request) and self._space(request) is not None

    def _begin(self, space: int, keys: Sequence[bytes], room: int) -> ripieno.Write:
        """Allocates files for the unstored blocks of a prefix, at most `room`. The catalog gets the
        whole prefix, because its stored part must not be evicted for the rest, or before it."""
        write = self.catalog.begin(space, keys)
        if write.is_short and self.catalog.stats().limbo:
            # Files evicted for it become free once the journal is durable.
            self.catalog.abort(write.id)
            try:
                self.catalog.sync()
            except ripieno.Error as error:
                self._fail(error)
            write = self.catalog.begin(space, keys)
        if len(write.positions) > room:
            self.catalog.abort(write.id)
            write = self.catalog.begin(space, keys[: write.positions[room]])
        return write

    def _watch(self, job: int, blocks: list[int]) -> None:
        """Watches the blocks of a save. vLLM counts them as free but keeps their contents, and
        reports when it reuses one: then the save ends first."""
        self.backlog += len(blocks)
        for block in blocks:
            self.reading.setdefault(block, set()).add(job)
        pool = self.cache._kv_cache_manager.block_pool
        watchers = Watchers.of(pool)
        if self.watched is not pool:
            self.watched = pool
            watchers.watchers.append(self._reused)
        held = [pool.blocks[block] for block in blocks]
        pool.touch(held)
        pool.unpin_blocks(held, watchers.reused)

    def _reused(self, block: KVCacheBlock) -> None:
        self.reused |= self.reading.get(block.block_id, set())

    def _described(self, request: Request, places: Places) -> list[Record]:
        """Returns events for blocks: one for each run of them in a group."""
        assert self.events is not None
        found: list[Record] = []
        groups, space = self.groups, self._space_name(request)
        for group, run in groups.runs(places):
            keys = groups.keys(request, [(group, at) for at in run] if groups.is_hybrid else run)
            own = groups.hashes_of(request, group, run.start, run.stop)
            parent = groups.hash(request, group, run.start - 1) if run.start else None
            about = groups.sizes[group], groups.kinds[group]
            event = self.events.describe(request, group, run, (parent, own), *about)
            found.append(Record(space, list(keys), event))
        return found

    def _tell_behind(self, name: str, records: list[Record]) -> None:
        """Has blocks announced after those that a request is still storing."""
        for save in reversed(self.saves.values()):
            if save.request == name:
                save.events += records
                return
        self._tell(records)

    def _tell(self, records: Sequence[Record]) -> None:
        """Has the blocks of records announced, also after a restart."""
        self._announce(records)
        if self.history:
            self.history.add(records)

    def _announce(self, records: Sequence[Record]) -> None:
        for each in records:
            event, space = each.event, self.spaces[each.space]
            assert self.events is not None and space is not None
            self.events.waiting.append(event)
            self.place.announced(space, each.keys)
            if self.groups.is_hybrid:
                hashes = ((event.group_idx, hash) for hash in event.block_hashes)
                self.announced_blocks.update(zip(each.keys, hashes, strict=True))

    def _stored(self, records: Sequence[Record]) -> list[Record]:
        """Returns what records have of stored blocks."""
        found: list[Record] = []
        for each in records:
            found += each.of(self._are_stored(each.space, each.keys))
        return found

    def _are_stored(self, name: tuple[str, str], keys: Sequence[bytes]) -> list[bool]:
        """Asks for keys of a namespace by its name. Those of adapters are unknown until used."""
        space = self.spaces.get(name)
        return [False] * len(keys) if space is None else self.catalog.are_stored(space, keys)

    def reported(self, reports: Reports | None, invalid: set[int]) -> None:
        if invalid:
            self._evict(invalid)
        if reports is None:
            return
        if reports.dead:
            self._fail_permanently(reports.dead)
        if reports.adapters:
            self.adapters.read(reports.adapters)
            # Saves of what this step computed have not ended before.
            for save in self.saves.values():
                save.is_wrong |= is_other(save.adapter, reports.adapters)
        self.catalog.lost(sorted(reports.lost))
        for job, count in reports.loaded.items():
            self._loaded(job, count, job in reports.corrupted, reports.waited.get(job, 0.0))
        for job, ranks in reports.written.items():
            self._written(job, ranks)
        for tokens, seconds in reports.steps:
            self.cost.computed(tokens, seconds)
        if reports.lost or reports.written:
            self.dirty.set()

    def _loaded(self, job: int, workers: int, is_corrupted: bool, waited: float) -> None:
        load = self.loads[job]
        load.workers -= workers
        load.waited = max(load.waited, waited)
        load.is_corrupted |= is_corrupted
        if load.workers > 0:
            return
        del self.loads[job]
        self.catalog.release(load.reference)
        if not load.is_corrupted:
            self.stats.count("loaded_blocks", load.blocks)
            self.cost.loaded(load.wait_blocks, load.tokens, load.waited)
            self.strikes["loads"] = 0
            return
        self.stats.count("load_failures")
        if self._struck("loads"):
            self._fail_permanently(f"{MAX_CONSECUTIVE_FAILURES} loads failed one after the other")

    def _written(self, job: int, ranks: dict[int, bytes | None]) -> None:
        save, state = self.saves[job], None
        for rank, checksums in ranks.items():
            if checksums is None or save.is_wrong:
                state = self.catalog.failed(save.write, rank)
            else:
                state = self.catalog.written(save.write, rank, checksums)
        if state is None:
            return
        del self.saves[job]
        self.backlog -= len(save.blocks)
        for block in save.blocks:
            self.reading[block].discard(job)
            if not self.reading[block]:
                del self.reading[block]
        if state and self._commit(save):
            self.stored += len(save.blocks)
            self.stats.count("stored_blocks", len(save.blocks))
            self.strikes["saves"] = 0
            # A block may have failed, or not fit the store's codec.
            self._tell(self._stored(save.events))
        elif save.is_wrong:
            # The blocks are computed again.
            self.saved.pop(save.request, None)
        else:
            self.stats.count("save_failures")
            self.stats.count("dropped_blocks", len(save.blocks))
            if self._struck("saves"):
                self._fail(f"{MAX_CONSECUTIVE_FAILURES} saves failed one after the other")

    def _commit(self, save: Save) -> bool:
        """Makes the blocks of a save visible. Returns False if nothing is stored any more, or the
        server is away."""
        try:
            return self.catalog.commit(save.write)
        except ripieno.ReadOnlyError as error:
            self.catalog.abort(save.write)
            self._fail(error)
            return False

    def _struck(self, what: str) -> bool:
        if not self.place.gives_up:
            return False
        self.strikes[what] += 1
        return self.strikes[what] == MAX_CONSECUTIVE_FAILURES

    def _fail_permanently(self, why: str) -> None:
        if not self.dead:
            self.dead = why
            logger.error("ripieno: serving goes on without the store: %s", why)

    def _evict(self, invalid: set[int]) -> None:
        """Evicts invalid blocks from vLLM's cache. vLLM recomputes blocks that failed to load, but
        meanwhile leaves their hashes in its cache, where another request would hit them. Blocks
        computed from them are wrong, too: some may be in steps that were started since."""
        manager = self.cache._kv_cache_manager
        for name in list(self.requests):
            (ids,) = manager.get_block_ids(name)
            at = next((at for at, block in enumerate(ids) if block in invalid), None)
            if at is not None:
                manager.evict_blocks(set(ids[at:]) - {0})
                self.saved[name] = min(self.saved.get(name, 0), at)
        for save in self.saves.values():
            save.is_wrong |= not invalid.isdisjoint(save.prefix)

    def forget(self, request: Request, ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Forgets a request that has ended, and returns the answers to its hints. ids: its blocks in
        each group."""
        name = request.request_id
        self.requests.pop(name, None)
        self.asked.pop(name, None)
        self.cost.declined.pop(name, None)
        if load := self.planned.pop(name, None):
            self.catalog.release(load.found.id)
        saved = self.saved.pop(name, None)
        self.told_behind.discard(name)
        is_stale = name in self.stale
        self.stale.discard(name)
        if saved is not None and not is_stale and self._may_store(request):
            full = self._full(request, request.num_computed_tokens)
            kept = self._kept(request, ids, full)
            left = len(kept) - self.groups.number_before(kept, saved)
            self.stats.count("dropped_blocks", max(0, left))
        answers = self._answers(request, ids)
        self.adapters.of.pop(name, None)
        return answers

    def _answers(self, request: Request, ids: Sequence[list[int]]) -> dict[str, Any] | None:
        if request.kv_hints is None:
            return None
        space = self._space(request)
        keys: Sequence[bytes] = ()
        if space is not None and not self.dead:
            full = self._full(request, request.num_prompt_tokens)
            keys = self.groups.keys(request, self._kept(request, ids, full))
        name = request.request_id
        saves = any(save.request == name for save in self.saves.values())
        space = self.namespace if space is None else space
        pin = partial(self.catalog.pin, space, keys, wait=saves)
        return {ANSWERS: answer(request.kv_hints, pin, self.catalog.unpin)}

    def reset(self) -> bool:
        """Drops all blocks, because the weights may change."""
        if self.options.keep_on_reset:
            return True
        try:
            epochs = {space: self.catalog.bump_epoch(space) for space in self._all_spaces()}
            for space, epoch in epochs.items():
                # A second reset: see _drop_changed().
                if self.options.server is None and epoch % 2 == 0:
                    epochs[space] = self.catalog.bump_epoch(space)
            self.epoch = epochs[self.namespace]
        except ripieno.Error as error:
            # The blocks cannot be dropped, so lookups must not find them.
            self._fail_permanently(f"it could not be reset: {error}")
            return False
        # Pending saves are stale, too, and so are blocks that requests compute from stale ones.
        for save in self.saves.values():
            save.is_wrong = True
        for name, request in self.requests.items():
            if request.num_computed_tokens > 0:
                self.stale.add(name)
        if self.events:
            self.events.cleared()
        try:
            self.catalog.sync()
        except ripieno.Error as error:
            self._fail(error)
            return False
        return True

    @property
    def is_pending(self) -> bool:
        """True if the engine should continue with empty steps, because saves are pending."""
        waited = time.monotonic() - self.last_work
        return bool(self.saves) and waited < self.options.patience and not self.dead

    def take_stats(self) -> Stats | None:
        counts = self.catalog.stats()
        self.stats.count("evicted_blocks", counts.evicted - self.evicted)
        self.evicted = counts.evicted
        if self.stats.is_empty() and not self.saves and not self.dead:
            return None
        self.stats.show("capacity_blocks", counts.files)
        self.stats.show("used_blocks", counts.stored)
        self.stats.show("pending_blocks", self.backlog)
        self.stats.show("healthy", int(not (self.dead or self.read_only)))
        stats, self.stats = self.stats, Stats()
        return stats

    def take_events(self) -> Iterable[KVCacheEvent]:
        if not self.events:
            return ()
        dropped = self.place.take_dropped(self._all_spaces())
        if self.groups.is_hybrid:
            # Keys are not vLLM's hashes, which only this process knows.
            for key in dropped:
                if known := self.announced_blocks.pop(key, None):
                    self.events.removed(known[0], [known[1]])
        else:
            self.events.removed_keys(dropped)
        if self.history:
            self._announce(self._stored(self.history.take(AGAIN_BLOCKS)))
        return self.events.take()

    def _fail(self, why: object) -> None:
        if not (self.read_only or self.dead):
            self.read_only = True
            logger.error("ripieno: nothing is stored any more: %s", why)

    def _sync(self) -> None:
        """Makes commits durable, on a separate thread."""
        while not self.stopped:
            self.dirty.wait()
            self.dirty.clear()
            try:
                self.catalog.sync()
            except ripieno.Error as error:
                self._fail(error)
                return

    def close(self) -> None:
        pending, before = self.backlog, self.stored
        self.reported(self.place.last_reports(self.saves), set())
        self.stopped = True
        if self.history:
            self.history.close()
        self.dirty.set()
        self.syncer.join()
        logger.info(
            "ripieno: shutdown (%s): %d blocks were on their way, %d of them were dropped; %s",
            self.options.shutdown,
            pending,
            pending - (self.stored - before),
            self.catalog.usage(self.namespace),
        )
        self.catalog.close()
