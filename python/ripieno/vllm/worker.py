"""The worker's half: it moves blocks between the KV cache and their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

import ripieno

from . import spans
from .adapters import Read, is_other
from .layout import FIRST, unwritten
from .metrics import Stats
from .protocol import Job, Reports, Tasks
from .saver import Saver, Stream
from .times import Instant, LayerTimes, StepTimes, header_of, on_stream

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from . import RipienoConnector
    from .place import Caches
    from .protocol import Ahead
    from .times import Mark

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")

IDLE_SECONDS = 0.0005
"""Sleep per idle step, to yield the CPU to I/O threads."""
QUIET_SECONDS = 10.0
"""Minimum time between warnings: a drive may fail at every request. The counters have all."""


@dataclass
class Loading:
    """A load in flight."""

    task: Job
    job: int
    """The plane's job."""
    begun: float
    layers: list[int]
    """Layers in flight, of a load between steps."""
    span: Span | None
    mark: Mark
    """Where the stream was: what it had to do before is no time of the load."""
    since: float
    """From when on it is waited for, as far as is known."""
    waited: float = 0.0
    """Seconds that it was waited for."""


def stream_of(device: str) -> Callable[[], Stream]:
    """Returns a function that returns the device's current CUDA stream; nothing on a CPU."""
    if device == "cpu":
        return tuple
    return lambda: (torch.cuda.current_stream(device).cuda_stream,)


class Worker:
    """Moves blocks between the KV cache and its files."""

    def __init__(self, connector: RipienoConnector, kv_caches: Caches) -> None:
        self.place, self.options = connector.place, connector.options
        self.rank: int = connector._vllm_config.parallel_config.rank
        self.part, self.copy = divmod(self.rank, connector.copies)
        """Number of the rank in the store, and among those that have the same KV cache: the first
        stores it."""
        self.rewritten: set[int] = set()
        """Files that the first one writes, until they are used here: the plane may know what was in
        them before."""
        self.block_bytes = connector.shape.rows * connector.shape.object_bytes
        self.world = connector.world
        self.is_hybrid = connector.groups.is_hybrid
        self.rows = range(connector.shape.rows)
        self.layers, self.computed = connector.layers, connector.computed
        self.blocks, self.kv_caches = connector.blocks, kv_caches
        pool = self._open()
        self.unwritten = unwritten(connector._kv_cache_config, connector.layout)
        """By group."""
        self.step, self.step_begun, self.step_seconds = 0, time.monotonic(), 0.0
        self.ahead: dict[int, tuple[Ahead, int]] = {}
        """By number: a request that waits, and the step in which it is announced."""
        self.times = self._layer_times(connector, pool.device)
        # Ranks compute the same steps at the same time.
        self.mark: Callable[[], Mark] = Instant if pool.device == "cpu" else on_stream
        self.step_times = StepTimes(self.mark) if self.rank == 0 else None
        self.tasks = Tasks()
        self.loading: list[Loading] = []
        """Loads of this step."""
        self.waited: set[int] = set()
        self.wait_seconds = 0.0
        self.pending: list[Loading] = []
        """Loads between steps."""
        self.ended: set[str] = set()
        """Requests whose load between steps could not begin, or ended before sleep."""
        self.invalid: set[int] = set()
        """Blocks that failed to load."""
        self.failed: set[str] = set()
        """Requests of a hybrid model with such blocks."""
        self.adapters = Read() if connector._vllm_config.lora_config else None
        self.reports, self.stats = Reports(), Stats()
        self.dead: str | None = None
        self.quiet_until = 0.0
        logger.info(
            "ripieno: rank %d: %d rows of %d blocks of %d bytes%s%s; route: %s",
            self.rank,
            len(self.rows),
            pool.blocks,
            connector.shape.object_bytes,
            ", copied by the CPU" if self.plane.is_bounced else "",
            f", stored by rank {self.rank - self.copy}" if self.copy else "",
            self.plane.placement,
        )

    def _open(self) -> ripieno.Pool:
        """Opens the plane, and begins to save."""
        self.is_asleep = False
        self.pages, pool = self.place.open_plane(self.rank, self.kv_caches)
        self.plane, self.paced = self.place.plane, self.place.paced
        self.stream = stream_of(pool.device)
        # Half of what the scheduler lets wait.
        is_paced = self.place.is_paced
        most = int(self.options.save_backlog * self.blocks) // 2 if is_paced else None
        if most is not None and self.plane.is_bounced:
            # Saves that wait would hold the buffers that loads need.
            most = 0
        self.saver = Saver(self.plane, list(self.rows), self.stream, most)
        return pool

    def sleep(self) -> None:
        """Ends all transfers and closes the plane: the KV cache's memory is about to go."""
        if self.is_asleep:
            return
        self.finish_loads()
        # Of requests that were aborted.
        pending, self.pending = self.pending, []
        for load in pending:
            for row in self.rows:
                self._attempt(self.plane.wait, load.job, row)
        self._end_loads(pending, self._end([load.job for load in pending]) if pending else {})
        self.ended.update(load.task.request for load in pending)
        self.saver.begin_step([], list(self.saver.unfinished))
        self.saver.close(0)
        self._take_saves()
        with suppress(ripieno.Error):
            self.plane.close()
        self.is_asleep = True

    def wake(self) -> None:
        """Opens the plane again: the KV cache's memory is back, at the same addresses."""
        if not self.is_asleep:
            return
        try:
            self._open()
        except ripieno.Error as error:
            self._fail_permanently(f"it could not be opened after sleep: {error}")

    def _layer_times(self, connector: RipienoConnector, device: str) -> LayerTimes | None:
        config = connector._vllm_config
        parallel = config.parallel_config
        # Ranks compute the same steps at the same time.
        path = self.options.layer_times
        if path is None or self.rank != 0:
            return None
        # Engines of a dense model do not know about the others, but have a number.
        if parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0:
            path += f".dp{parallel.data_parallel_index}"
        header = header_of(config, device, len(self.rows))
        return LayerTimes(path, header, Instant if device == "cpu" else on_stream)

    def begin(self, tasks: Tasks) -> None:
        """Begins a step, before it changes any block."""
        self.tasks = tasks
        self._begin_step()
        if self.times:
            self.times.begin(tasks.computes)
        if self.copy:
            self.rewritten.update(file for save in tasks.saves for file in save.files)
        saves = [] if self.copy else tasks.saves
        self.saver.begin_step(saves, tasks.reused)
        self._clear_unwritten(saves)
        if self.step_times:
            self.step_times.begin(0 if tasks.loads else tasks.tokens)

    def _clear_unwritten(self, saves: Sequence[Job]) -> None:
        """Clears what a block is stored with and its layers do not write: it may have been another
        tenant's."""
        for group, parts in enumerate(self.unwritten):
            if parts:
                of = [zip(save.blocks, save.groups, strict=True) for save in saves]
                blocks = [block for each in of for block, its in each if its == group]
                for row, begin, end in parts if blocks else ():
                    self.pages[row][blocks, begin:end] = 0

    def _begin_step(self) -> None:
        if self.paced is None:
            return
        now = time.monotonic()
        # Idle steps serve transfers; requests do not wait for them.
        if not self.tasks.is_idle:
            if self.step > 0:
                self._attempt(self.paced.end_step, self.step, self.step_seconds)
            self.step += 1
            self._attempt(self.paced.begin_step, self.step)
        self.step_begun = now
        for number, _ in self.tasks.withdrawn:
            self.ahead.pop(number, None)
        for ahead in self.tasks.ahead:
            self._forget_rewritten(ahead.files)
        self.ahead |= {ahead.number: (ahead, self.step) for ahead in self.tasks.ahead}
        for number, (ahead, at) in self.ahead.items():
            if self.step >= at:
                # It is announced again if it still waits by then, and in the first step, because
                # the duration of a step is not known yet.
                again = self.step + (ahead.steps if self.step > 1 else 1)
                self.ahead[number] = ahead, again
                checksums = ahead.checksums[self.part]
                self._attempt(self.paced.announce, number, ahead.files, checksums, ahead.steps)

    def _forget_rewritten(self, files: Iterable[int]) -> None:
        """Has the plane forget what was in stored files before. Not when they are written: they might
        be read ahead after that, for a request that was announced with them."""
        if rewritten := self.rewritten.intersection(files):
            self.rewritten -= rewritten
            self._attempt(self.place.forget, sorted(rewritten))

    def start_loads(self, has_hooks: bool) -> None:
        """Starts all loads, layer by layer: the first layers of all requests come first."""
        begun, self.waited, self.wait_seconds = [], set(), 0.0
        for task in self.tasks.loads:
            self._forget_rewritten(task.files)
            try:
                if self.adapters and is_other(task.adapter, self.adapters.digests):
                    raise ripieno.StaleError("the files of its adapter are not those vLLM has read")
                job = self.plane.begin_load(
                    task.files,
                    task.blocks[: len(task.files)],
                    task.checksums[self.part],
                    request=task.id,
                    step=None if task.is_async else self.step,
                )
            except ripieno.Error as error:
                self._fail(task, 0, error)
                if task.is_async:
                    self.ended.add(task.request)
            else:
                about = {"rank": self.rank, "blocks": len(task.files), "tokens": task.tokens}
                span = spans.begin("ripieno.load", task.trace, **about)
                now, rows = time.monotonic(), list(self.rows)
                begun.append(Loading(task, job, now, rows, span, self.mark(), now))
        # On a GPU, earlier work that uses the blocks may still be running.
        stream = self.stream()
        for layer in self.rows:
            for load in begun:
                self._attempt(self.plane.start, load.job, layer, *stream)
        self.pending += [load for load in begun if load.task.is_async]
        self.loading += [load for load in begun if not load.task.is_async]
        # Their blocks were protected until now.
        if self.paced:
            for number, runs in self.tasks.withdrawn:
                self._attempt(self.paced.withdraw, number, runs)
        # A FULL graph runs without the layers' hooks: its inputs must be loaded before.
        if not (has_hooks and self.layers):
            self.finish_loads()
        self.wait_layer(FIRST)

    def _attempt(self, act: Callable[..., Any], job: Any, *more: Any) -> Any:
        try:
            return act(job, *more)
        except ripieno.Error:
            # The job reports the error when it ends.
            return True

    def wait_layer(self, name: str) -> None:
        layer = self.layers.get(name)
        if layer is None:
            return
        # Earlier rows first: a layer may need several.
        rows = [row for row in range(layer + 1) if row not in self.waited] if self.loading else []
        if self.times:
            self.times.layer(layer, bool(rows))
        if rows:
            since = time.monotonic()
            self.waited.update(rows)
            stream = self.stream()
            for row, load in product(rows, self.loading):
                span = spans.begin("ripieno.wait", load.span, rank=self.rank, layer=row)
                # On a GPU the stream waits. Errors of the load are checked at its end.
                if self._attempt(self.place.join, load.job, row, stream):
                    # The stream does not wait for it.
                    self._attempt(self.plane.wait, load.job, row)
                spans.end(span)
            self.wait_seconds += time.monotonic() - since
            if self.times:
                self.times.loaded()

    def finish_loads(self) -> None:
        """Ends this step's loads."""
        if not self.loading:
            return
        begun, (loading, self.loading) = time.monotonic(), (self.loading, [])
        loading[-1].mark.synchronize()
        since = time.monotonic()
        ended = self._end([load.job for load in loading])
        # A GPU computes meanwhile: its stream waits less than this.
        for load in loading:
            load.waited = self.wait_seconds + time.monotonic() - since
        self._end_loads(loading, ended)
        self.stats.observe("load_wait_seconds", self.wait_seconds + time.monotonic() - begun)

    def _end_loads(self, loads: list[Loading], ended: dict[int, ripieno.Report]) -> None:
        for load in loads:
            report = ended.get(load.job)
            error = report.error if report else self.dead
            spans.end(load.span, error)
            task = load.task
            if error is None:
                self.stats.observe("load_seconds", time.monotonic() - load.begun)
                if self.times and self.times.token_seconds:
                    # One rank observes it for all.
                    saved = task.tokens * self.world * self.times.token_seconds
                    self.stats.observe("compute_saved_seconds", saved)
                self.stats.count("loaded_bytes", len(task.files) * self.block_bytes)
                self.reports.waited[task.id] = load.waited
                self._arrived(task, len(task.files))
            else:
                good = self._valid_prefix_len(task)
                self.stats.count("checksum_mismatches", int(bool(report and report.is_mismatch)))
                self._fail(task, good, error)

    def _end(self, jobs: Sequence[int]) -> dict[int, ripieno.Report]:
        """Ends jobs. Returns the reports by job."""
        try:
            reports = {report.job: report for report in self.plane.end(jobs)}
            self.reports.lost.update(self.plane.take_lost())
            return reports
        except ripieno.Error as error:
            self._fail_permanently(str(error))
            return {}

    def _valid_prefix_len(self, task: Job) -> int:
        """Returns how many leading blocks of a failed load have the right contents."""
        lost = (at for at, file in enumerate(task.files) if file in self.reports.lost)
        good = next(lost, 0)
        if good == 0 or self.dead or self.is_hybrid:
            return 0
        # After a failure no further layer was started: these blocks are read again.
        rows = len(task.checksums[self.part]) // len(task.files)
        try:
            job = self.plane.begin_load(
                task.files[:good], task.blocks[:good], task.checksums[self.part][: good * rows]
            )
        except ripieno.Error:
            return 0
        for layer in self.rows:
            self._attempt(self.plane.start, job, layer, *self.stream())
        report = self._end([job]).get(job)
        return good if report and report.error is None else 0

    def _fail(self, task: Job, good: int, error: object) -> None:
        if isinstance(error, ripieno.ClosedError):
            self._fail_permanently(str(error))
        bad, all = len(task.blocks) - good, len(task.blocks)
        self._warn(f"{task.request}: {bad} of {all} blocks did not arrive: {error}")
        self._arrived(task, good)

    def _warn(self, text: str) -> None:
        if not self.dead and time.monotonic() >= self.quiet_until:
            self.quiet_until = time.monotonic() + QUIET_SECONDS
            logger.warning("ripieno: %s", text)

    def _arrived(self, task: Job, good: int) -> None:
        """Reports the end of a load of which the first `good` blocks arrived. Later blocks are
        invalid, because each depends on those before it."""
        self.reports.loaded[task.id] += 1
        if bad := task.blocks[good:]:
            self.reports.corrupted.add(task.id)
            if self.is_hybrid:
                # vLLM does not know blocks of several groups apart.
                self.failed.add(task.request)
            else:
                self.invalid.update(bad)
            for page in self.pages:
                # The stale contents might be NaNs.
                page[bad] = 0

    def _fail_permanently(self, why: str) -> None:
        self.dead = self.dead or why
        self.reports.dead = self.dead

    def save_layer(self, name: str) -> None:
        row = self.computed.get(name)
        if row is not None:
            self.saver.store(row)

    def finish_saves(self) -> None:
        """Ends the step's saves: all layers are computed."""
        self.saver.end_step()
        if self.step_times:
            self.step_times.end()
        if self.times:
            self.times.end()

    def finished(self) -> set[str]:
        """Returns the requests whose loads between steps have ended."""
        # With speculative decoding this comes before wait_for_save.
        self.finish_loads()
        if not self.tasks.is_idle:
            self.step_seconds = time.monotonic() - self.step_begun
        done = []
        for load in self.pending:
            load.layers = [
                layer
                for layer in load.layers
                if not self._attempt(self.plane.poll, load.job, layer)
            ]
            if not load.layers:
                done.append(load)
            else:
                now = time.monotonic()
                if not load.mark.query():
                    load.since = now
                # It may end right after that: the rest of the step is no time of the load.
                load.waited = now - load.since
        self.pending = [load for load in self.pending if load.layers]
        self._end_loads(done, self._end([load.job for load in done]) if done else {})
        self._take_saves()
        ended, self.ended = self.ended, set()
        if self.tasks.is_idle and not done and not ended:
            time.sleep(IDLE_SECONDS)
        return {load.task.request for load in done} | ended

    def take_invalid(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def take_failed(self) -> set[str]:
        failed, self.failed = self.failed, set()
        return failed

    def take_reports(self) -> Reports | None:
        reports, self.reports = self.reports, Reports()
        if self.step_times:
            reports.steps = self.step_times.take()
        if self.adapters:
            reports.adapters = self.adapters.take()
        return reports or None

    def _take_saves(self) -> None:
        ended = self.saver.take()
        if ended:
            # Blocks that do not fit the codec: reported before their saves are committed.
            with suppress(ripieno.Error):
                self.reports.lost.update(self.plane.take_lost())
        for saved in ended:
            if saved.error is None:
                self.stats.observe("save_seconds", saved.seconds)
                self.stats.count("stored_bytes", saved.blocks * self.block_bytes)
            elif not self.saver.dropping:
                self._warn(f"{saved.blocks} blocks were not stored: {saved.error}")
            self.reports.written.setdefault(saved.id, {})[self.part] = saved.checksums
        if self.saver.dead:
            self._fail_permanently(self.saver.dead)

    def take_stats(self) -> Stats | None:
        stats, self.stats = self.stats, Stats()
        return None if stats.is_empty() else stats

    def close(self) -> None:
        self.saver.close(self.options.patience)
        self._take_saves()
        if self.times:
            self.times.close()
        try:
            self.reports.adapters = self.adapters.take() if self.adapters else {}
            # Another copy may outlive a killed engine, without a lock: its report would be read by
            # the next one. It has no saves, which are what the report is for.
            if not self.copy:
                self.place.leave(self.rank, self.reports)
            self.plane.close()
        except ripieno.Error as error:
            # Asleep, the plane is closed, and has no counts.
            if not self.is_asleep:
                logger.error("ripieno: rank %d: %s", self.rank, error)
