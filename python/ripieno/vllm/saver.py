"""A worker's saves, on a separate thread, so that no step waits for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ripieno

if TYPE_CHECKING:
    from .protocol import Job

Stream = tuple[int, ...]
"""Handle of the CUDA stream that computes; nothing on a CPU."""

POLL_SECONDS = 0.01
"""Interval at which the thread looks for saves that have ended."""

SAVES_MAX = 100
"""Saves that may wait for their turn: a server counts them, and loads need room there, too."""


@dataclass
class Saving:
    """A save in flight."""

    id: int
    files: list[int]
    blocks: list[int]
    begun: float
    job: int | None = None
    """The plane's job."""
    moving: list[int] = field(default_factory=list)
    """Layers that were started and may not have ended."""
    is_complete: bool = False
    """Set when no more layers will be started."""
    is_urgent: bool = False
    """Set when its layers start at once."""
    error: str | None = None


@dataclass(frozen=True)
class Saved:
    """Result of a save."""

    id: int
    blocks: int
    seconds: float
    checksums: bytes | None
    """None if it failed."""
    error: str | None


class Saver:
    """Stores blocks layer by layer. With `most`, the plane decides when layers start, unless a step
    waits for their blocks, or more than that many blocks are pending."""

    def __init__(
        self,
        plane: ripieno.Plane | ripieno.ServedPlane,
        layers: list[int],
        stream: Callable[[], Stream] = tuple,
        most: int | None = None,
    ) -> None:
        self.plane, self.layers = plane, layers
        self.stream, self.most = stream, most
        self.step: list[Saving] = []
        """Saves of this step."""
        self.started: set[int] = set()
        """Their layers that were started."""
        self.tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        """Functions for the thread to call; None is the last one."""
        self.ended: list[Saved] = []
        self.unfinished: dict[int, int] = {}
        """By save: its number of blocks."""
        self.wanted: set[int] = set()
        """Saves that a step waits for."""
        self.changed = threading.Condition()
        self.dead: str | None = None
        self.closing = self.dropping = self.broken = False
        self.thread = threading.Thread(target=self._run, name="ripieno saver", daemon=True)
        self.thread.start()

    def begin_step(self, saves: Iterable[Job], reused: list[int]) -> None:
        """Begins a step. On return, the blocks of the saves in `reused` may be changed."""
        self.end_step()
        with self.changed:
            self.wanted = self.unfinished.keys() & set(reused)
            if self.wanted:
                # Wakes up the thread.
                self.tasks.put(tuple)
                ended = self.unfinished.keys().isdisjoint
                self.changed.wait_for(lambda: ended(reused) or self.broken)
                self.wanted = set()
            now = time.monotonic()
            self.step = [Saving(save.id, save.files, save.blocks, now) for save in saves]
            self.unfinished.update((saving.id, len(saving.blocks)) for saving in self.step)

    def store(self, layer: int) -> None:
        """Stores a layer of this step's saves, which was computed."""
        if self.step and layer not in self.started:
            self.started.add(layer)
            savings, stream = self.step, self.stream()

            def start() -> None:
                for saving in savings:
                    self._start(saving, layer, stream)

            self.tasks.put(start)

    def end_step(self) -> None:
        """Ends the step: all layers are computed, also those that no hook reported."""
        for layer in self.layers if self.step else ():
            self.store(layer)
        if savings := self.step:

            def complete() -> None:
                for saving in savings:
                    saving.is_complete = True

            self.tasks.put(complete)
        self.step, self.started = [], set()

    def take(self) -> list[Saved]:
        """Returns the saves that have ended since the last call."""
        with self.changed:
            ended, self.ended = self.ended, []
            return ended

    def close(self, seconds: float) -> None:
        """Waits at most `seconds` for pending saves, and drops the rest."""
        self.end_step()
        self.dropping, self.closing = seconds <= 0, True
        self.tasks.put(None)
        self.thread.join(seconds)
        self.dropping = True
        self.thread.join()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # Wakes up waiters: this thread will never do so again.
            with self.changed:
                self.broken = True
                self.changed.notify_all()

    def _work(self) -> None:
        is_open = True
        self.savings: list[Saving] = []
        """Saves with a job, or an error."""
        while is_open or self.savings:
            try:
                # Without pacing, the end of a save waits for its layers.
                polls = self.savings and (self.most is not None or not is_open)
                wait = POLL_SECONDS if polls else None
                task = self.tasks.get(timeout=wait)
                while task is not None:
                    task()
                    task = self.tasks.get_nowait()
                is_open = False
            except queue.Empty:
                pass
            self._hurry()
            self._end([saving for saving in self.savings if self._is_over(saving)])

    def _start(self, saving: Saving, layer: int, stream: Stream) -> None:
        if saving.job is None and saving.error is None:
            self.savings.append(saving)
            if self.most is not None and len(self.savings) > SAVES_MAX:
                complete = [each for each in self.savings if each.is_complete]
                self._urge(oldest := complete[: len(self.savings) - SAVES_MAX])
                self._end(oldest)
        if self.dropping:
            saving.error = saving.error or "it was dropped: the engine ends"
        if saving.error is not None:
            return
        try:
            if saving.job is None:
                saving.job = self.plane.begin_store(saving.files, saving.blocks)
            self.plane.start(saving.job, layer, *stream)
            saving.moving.append(layer)
        except ripieno.Error as error:
            saving.error = str(error)
            if isinstance(error, ripieno.ClosedError):
                self.dead = str(error)

    def _hurry(self) -> None:
        """Has the layers start that a step waits for, or all of them if too many wait, or at the
        end."""
        if self.most is None:
            return
        with self.changed:
            is_full = self.closing or sum(self.unfinished.values()) > self.most
            wanted = self.wanted
        self._urge(each for each in self.savings if is_full or each.id in wanted)

    def _urge(self, savings: Iterable[Saving]) -> None:
        for saving in savings:
            if saving.job is not None and not saving.is_urgent:
                saving.is_urgent = True
                try:
                    self.plane.hurry(saving.job)
                except ripieno.Error:
                    # The job reports the error when it ends.
                    pass

    def _is_over(self, saving: Saving) -> bool:
        """Returns True if all layers were started and, with pacing, none is in flight."""
        if self.most is None:
            return saving.is_complete
        job = saving.job
        try:
            while job is not None and saving.moving and self.plane.poll(job, saving.moving[0]):
                del saving.moving[0]
        except ripieno.Error:
            # The job reports the error when it ends, and waits for the other layers.
            saving.moving.clear()
        return saving.is_complete and not saving.moving

    def _end(self, savings: list[Saving]) -> None:
        """Ends saves: one flush for all of them."""
        if not savings:
            return
        self.savings = [saving for saving in self.savings if saving not in savings]
        jobs = [saving.job for saving in savings if saving.job is not None]
        reports: dict[int | None, ripieno.Report] = {}
        try:
            reports |= {report.job: report for report in self.plane.end(jobs)} if jobs else {}
        except ripieno.Error as error:
            self.dead = str(error)
        now = time.monotonic()
        ended = []
        for saving in savings:
            report = reports.get(saving.job)
            problem = saving.error or (report.error if report else self.dead)
            checksums = report.checksums if report and problem is None else None
            ended.append(
                Saved(saving.id, len(saving.blocks), now - saving.begun, checksums, problem)
            )
        with self.changed:
            self.ended += ended
            for saving in savings:
                del self.unfinished[saving.id]
            self.changed.notify_all()
