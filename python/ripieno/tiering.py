"""A secondary tier for vLLM's tiered offloading: KV cache on NVMe below vLLM's CPU tier.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
            "secondary_tiers": [{"type": "ripieno", "path": "/var/lib/kv", "capacity": "100GiB"}]}}'

("type": "RipienoTier", "module_path": "ripieno.tiering" if the package is not installed.)

The tier runs in the scheduler's process. vLLM's CPU tier is one region of shared memory, in which a
row is one chunk of all workers' bytes: a chunk is an object of the store, and the region its pool.

The options are in docs/reference/vllm.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

# Raises first if this is another version of vLLM.
import ripieno.vllm  # isort: skip

import vllm.v1.core.kv_cache_utils as hashing
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadKey,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import ripieno
from ripieno.capacity import made_in
from ripieno.options import parse_path
from ripieno.vllm.hints import answer, stores
from ripieno.vllm.identity import origin_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata, ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    Act = Callable[[list[OffloadKey], list[int]], tuple[list[OffloadKey], int]]
    """Moves these keys' chunks. Returns the keys that arrived, and the chunks that were moved."""
    Moved = tuple[list[OffloadKey], int, float]
    """Keys that arrived, bytes and seconds."""

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno.tiering")

THREADS = 2
"""Threads for each direction: one moves data while the other one waits for the journal."""
HASH_BYTES = 32
"""Of SHA-256. Hashes with fewer bytes are not cryptographic."""
BATCH_BYTES = 256 << 20
"""Size of a request to the store: it must finish within the store's timeout on a slow disk."""

# The prefix is vLLM's: it unregisters such metrics when an engine is created again.
CAPACITY, USED, HEALTHY, EVICTED, LOST = (
    f"vllm:ripieno_tier_{name}"
    for name in ("capacity_chunks", "used_chunks", "healthy", "evicted_chunks", "lost_chunks")
)
METRICS = {
    CAPACITY: OffloadingGaugeMetadata("Chunks that the store has room for."),
    USED: OffloadingGaugeMetadata("Chunks of this model that the store holds."),
    HEALTHY: OffloadingGaugeMetadata("0 when serving goes on without the tier."),
    EVICTED: OffloadingCounterMetadata("Chunks of this model that were evicted for others."),
    LOST: OffloadingCounterMetadata("Chunks that were found, and could not be loaded."),
}


class Offered(set[OffloadKey]):
    """Chunks of a request with hints that vLLM gave to the tier to store."""


class RipienoTier(SecondaryTierManager):
    """See the module's documentation. vLLM calls it from its scheduler's thread."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: TieringOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        capacity: int | str,
        weights_id: str = "",
        keep_on_reset: bool = False,
        shutdown: str = "drain",
        backpressure_detector: Any = None,
        **store: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        if shutdown not in ("drain", "drop"):
            raise ValueError(f'shutdown: {shutdown!r} was given; give "drain" or "drop"')
        self.keep_on_reset, self.drops = keep_on_reset, shutdown == "drop"
        config = offloading_spec.config
        tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
        shape = ripieno.Shape(1, 1, self.block_size_bytes, tokens)
        # The name holds all parameters of the files' layout. The namespace holds the rest.
        name = f"tier-chunk{self.block_size_bytes}"
        if config.parallel.data_parallel_size > 1:
            name += f"-dp{config.parallel.data_parallel_index}"
        path = parse_path(path, "path")
        self.path = os.path.join(path, name)

        def make(bytes: int) -> ripieno.Store:
            return ripieno.Store(
                self.path,
                shape,
                ripieno.Pool.contiguous(primary_kv_view, shape),
                namespace=namespace_of(offloading_spec, tokens, weights_id),
                capacity=bytes,
                **store,
            )

        engines = config.parallel.data_parallel_size
        self.store = made_in(path, name, ripieno.parse_size(capacity, "capacity"), make, engines)
        self.batch = max(1, BATCH_BYTES // self.block_size_bytes)
        self.loader = ThreadPoolExecutor(THREADS, "ripieno-load")
        self.storer = ThreadPoolExecutor(THREADS, "ripieno-store")
        self.jobs: dict[int, tuple[Future[Moved], TransferJob]] = {}
        """By job: its future and its metadata."""
        self.declined: list[JobResult] = []
        """Jobs of requests that store nothing, since the last get_finished_jobs()."""
        self.offers_all = False
        """True after such a job: the chunks are in vLLM's CPU tier, and vLLM gives chunks that are
        there to a tier only if it asks for all."""
        self.bad: set[OffloadKey] = set()
        """Keys that failed to load: misses until they are stored again."""
        self.events: list[OffloadingEvent] | None = None
        """Chunks stored since the last take_events(), if vLLM publishes such events."""
        self.known: dict[bytes, OffloadKey] = {}
        """With events, by the store's key: a chunk that was announced."""
        if config.enable_kv_cache_events:
            self.events = []
            self.store.take_dropped()
        self.dead: str | None = None
        """The reason if the store is no longer used, else None."""
        self.told: set[type[Exception]] = set()
        """Kinds of errors that were already logged."""
        self.capacity = self.store.counts().files
        usage = self.store.usage()
        self.evicted = usage.evicted
        """Count at the last report."""
        self.lost = 0
        """Chunks lost since the last report."""
        self.news = True
        """True when there is something to report."""
        logger.info("ripieno: %d chunks are stored in %s", usage.stored, self.path)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # Not available earlier: vLLM creates its tiers first.
        if len(hashing.NONE_HASH) < HASH_BYTES:
            self._fail_permanently(
                f"vLLM's block hashes have {len(hashing.NONE_HASH)} bytes: prompts with the same "
                "hash can be made; use --prefix-caching-hash-algo sha256_cbor"
            )
        has_hints = req_context.kv_hints is not None
        if has_hints:
            req_context.set_state(Offered())
        offers_all = has_hints or self.offers_all
        policy = OffloadPolicy.REQUEST_LEVEL if offers_all else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        hints, offered = req_context.kv_hints, req_context.get_state(Offered)
        if hints is None or offered is None:
            return

        def place(key: OffloadKey) -> tuple[int, OffloadKey]:
            return req_context.get_offload_key_position(key) or 0, key

        keys = [] if self.dead else [_digest(key) for key in sorted(offered, key=place)]
        own = (job for _, job in self.jobs.values() if job.req_context is req_context)
        saves = any(not job.is_promotion for job in own)
        pin = partial(self.store.pin, keys, wait=saves)
        answers = answer(hints, pin, self.store.unpin, self._failed)
        logger.info("ripieno: hints of request %s: %s", req_context.req_id, answers)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.dead or key in self.bad or not self._are_stored([key])[0]:
            return LookupResult.MISS
        return LookupResult.HIT

    def _are_stored(self, keys: Sequence[OffloadKey]) -> list[bool]:
        try:
            return self.store.are_stored([_digest(key) for key in keys])
        except ripieno.Error as error:
            # It would end vLLM's scheduler.
            self._failed(error)
            return [False] * len(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if not stores(job_metadata.req_context):
            self.offers_all = True
            self.declined.append(JobResult(job_metadata.job_id, True, (), 0, 0))
            return
        if (offered := job_metadata.req_context.get_state(Offered)) is not None:
            offered.update(job_metadata.keys)
        self._submit(self.storer, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self.loader, self._load, job_metadata)

    def _submit(self, threads: ThreadPoolExecutor, act: Act, job: TransferJob) -> None:
        keys, chunks = list(job.keys), [int(chunk) for chunk in job.chunk_ids]
        self.jobs[job.job_id] = threads.submit(self._in_batches, act, keys, chunks), job

    def _in_batches(self, act: Act, keys: list[OffloadKey], chunks: list[int]) -> Moved:
        done: list[OffloadKey] = []
        moved, start = 0, time.monotonic()
        for at in range(0, len(keys), self.batch):
            end = at + self.batch
            try:
                some, chunks_moved = act(keys[at:end], chunks[at:end])
            except Exception as error:
                # It would end vLLM's scheduler.
                self._failed(error)
            else:
                done += some
                moved += chunks_moved * self.block_size_bytes
        return done, moved, time.monotonic() - start

    def _store(self, keys: list[OffloadKey], chunks: list[int]) -> tuple[list[OffloadKey], int]:
        if bad := [_digest(key) for key in keys if key in self.bad]:
            self.store.remove(bad)
        found = self._are_stored(keys)
        new = [at for at, there in enumerate(found) if not there]
        stored = 0
        if new and not self.dead:
            digests = [_digest(keys[at]) for at in new]
            with self.store.store(digests, [chunks[at] for at in new]) as request:
                request.move_all()
                stored = request.commit()
        there = [key for key, there in zip(keys, found, strict=True) if there]
        return there + [keys[at] for at in new[:stored]], stored

    def _load(self, keys: list[OffloadKey], chunks: list[int]) -> tuple[list[OffloadKey], int]:
        done: list[OffloadKey] = []
        try:
            with self.store.load([_digest(key) for key in keys], chunks) as request:
                request.move_all()
                done += compress(keys, request.found)
        except ripieno.Error as error:
            self._failed(error)
            if len(keys) > 1:
                # One is damaged. The others may still be stored.
                for key, chunk in zip(keys, chunks, strict=True):
                    done += self._load([key], [chunk])[0]
        return done, len(done)

    def get_finished_jobs(self) -> Iterator[JobResult]:
        declined, self.declined = self.declined, []
        yield from declined
        for job_id in [job_id for job_id, (future, _) in self.jobs.items() if future.done()]:
            self.news = True
            future, job = self.jobs.pop(job_id)
            done, moved, seconds = future.result()
            rest = set(job.keys).difference(done)
            if job.is_promotion:
                self.bad |= rest
                self.lost += len(rest)
            else:
                self.bad.difference_update(done)
                if self.events is not None and done:
                    self.known |= {_digest(key): key for key in done}
                    self.events.append(self._event(done, removed=False))
            yield JobResult(job_id, not rest, done, seconds, moved)

    def take_events(self) -> list[OffloadingEvent]:
        if self.events is None:
            return []
        try:
            dropped = self.store.take_dropped() if not self.dead else []
        except ripieno.Error as error:
            self._failed(error)
            dropped = []
        removed = [self.known.pop(key) for key in dropped if key in self.known]
        # A chunk may have been stored again since.
        gone = [key for key, has in zip(removed, self._are_stored(removed), strict=True) if not has]
        self.known |= {_digest(key): key for key in removed if key not in gone}
        events, self.events = self.events, []
        return [*events, self._event(gone, removed=True)] if gone else events

    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys, self.medium, removed, self.locality)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return METRICS

    def get_stats(self) -> OffloadingConnectorStats | None:
        if not self.news:
            return None
        stats = OffloadingConnectorStats()
        stats.set_gauge(CAPACITY, self.capacity)
        try:
            usage = self.store.usage()
        except ripieno.Error as error:
            self._failed(error)
        else:
            stats.set_gauge(USED, usage.stored)
            stats.increase_counter(EVICTED, usage.evicted - self.evicted)
            self.evicted = usage.evicted
        stats.set_gauge(HEALTHY, int(not self.dead))
        stats.increase_counter(LOST, self.lost)
        self.news, self.lost = False, 0
        return stats

    def drain_jobs(self) -> None:
        """Handles a reset of vLLM's caches."""
        wait([future for future, _ in self.jobs.values()])
        if self.keep_on_reset or self.dead:
            return
        try:
            self.store.bump_epoch()
            self.store.sync()
        except ripieno.Error as error:
            self._fail_permanently(f"it could not be reset: {error}")

    def shutdown(self) -> None:
        waiting = sum(not future.done() for future, _ in self.jobs.values())
        if waiting:
            logger.info("ripieno: %d jobs are %s", waiting, "dropped" if self.drops else "ended")
        self.loader.shutdown(cancel_futures=True)
        self.storer.shutdown(cancel_futures=self.drops)
        try:
            used = {name: value for name, value in self.store.stats().items() if value}
            logger.info("ripieno: %s", used)
        except ripieno.Error as error:
            self._failed(error)
        try:
            self.store.close()
        except ripieno.Error as error:
            # Memory that a device may still reach stays mapped.
            logger.error("ripieno: %s", error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ripieno.ClosedError):
            self._fail_permanently(str(error))
        elif type(error) not in self.told:
            self.told.add(type(error))
            logger.warning("ripieno: %s (further ones of this kind are not logged)", error)

    def _fail_permanently(self, why: str) -> None:
        if not self.dead:
            self.dead, self.news = why, True
            logger.error("ripieno: serving goes on without the tier in %s: %s", self.path, why)


def _digest(key: OffloadKey) -> bytes:
    """Returns the store's key for vLLM's: a hash of the tokens so far and the KV cache group."""
    return hashlib.sha256(key).digest()


def namespace_of(spec: TieringOffloadingSpec, tokens: int, weights_id: str) -> ripieno.Namespace:
    """Returns the namespace: all tier parameters that change bytes and are not in vLLM's hashes."""
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, True)
    model = spec.config.model
    return ripieno.Namespace(
        weights=hashlib.sha256(json.dumps([origin_of(model.name), weights_id]).encode()).digest(),
        layout=json.dumps(mapper.fields | {"layout": spec.config.kv_cache_layout}, sort_keys=True),
        dtype=model.dtype,
        block_tokens=tokens,
        label=os.path.basename(model.name).encode()[:64].decode(errors="ignore"),
    )
