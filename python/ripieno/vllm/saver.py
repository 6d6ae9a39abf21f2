"""A worker's saves, on a separate thread, so that no step waits for them."""

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

import ripieno


DEPTH_BYTES = 8 << 20
"""Limit of saves in flight with a schedule: a new load waits behind at most these bytes."""


@dataclass
class Saving:
    """A save in flight."""

    id: int
    files: list[int]
    blocks: list[int]
    begun: float
    job: int | None = None
    """The plane's job."""
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
    """Stores blocks layer by layer, in the order of the calls.

    With `schedule`, loads have priority: no save starts while a load is in flight, and at most
    DEPTH_BYTES of saves are in flight; unless a step waits for a save, or more than `schedule`
    blocks are pending.
    """

    def __init__(self, plane, layers, stream=tuple, schedule=None, layer_bytes=0):
        self.plane, self.layers = plane, layers
        self.stream = stream
        """Returns the stream that computes; nothing on a CPU."""
        self.step, self.started = [], set()
        """Saves of this step; their layers that were started."""
        self.schedule, self.layer_bytes = schedule, layer_bytes
        self.is_loading = self.is_wanted = False
        self.flying = deque()
        """With a schedule: job, layer and bytes of transfers that may not have ended."""
        self.tasks = queue.SimpleQueue()
        self.ended = []
        self.unfinished = {}
        self.changed = threading.Condition()
        self.dead = None
        self.dropping = self.broken = False
        self.thread = threading.Thread(target=self._run, name="ripieno saver", daemon=True)
        self.thread.start()

    def begin_step(self, saves, reused):
        """Begins a step. On return, the blocks of the saves in `reused` may be changed."""
        self.end_step()
        with self.changed:
            self.is_wanted = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.unfinished.keys().isdisjoint(reused) or self.broken)
            self.is_wanted = False
            now = time.monotonic()
            self.step = [Saving(save.id, save.files, save.blocks, now) for save in saves]
            self.unfinished.update((saving.id, len(saving.blocks)) for saving in self.step)

    def give_way(self, is_loading):
        """Sets whether a load is in flight from now on."""
        if self.schedule is not None and self.is_loading != is_loading:
            with self.changed:
                self.is_loading = is_loading
                self.changed.notify_all()

    def store(self, layer):
        """Stores a layer of this step's saves, which was computed."""
        if self.step and layer not in self.started:
            self.started.add(layer)
            self.tasks.put((self.step, layer, self.stream()))

    def end_step(self):
        """Ends the step: all layers are computed, also those that no hook reported."""
        for layer in self.layers if self.step else ():
            self.store(layer)
        if self.step:
            self.tasks.put((self.step, None, ()))
        self.step, self.started = [], set()

    def take(self):
        """Returns the saves that have ended since the last call."""
        with self.changed:
            ended, self.ended = self.ended, []
            return ended

    def close(self, seconds):
        """Waits at most `seconds` for pending saves, and drops the rest."""
        self.end_step()
        self.give_way(False)
        self.dropping = seconds <= 0
        self.tasks.put(None)
        self.thread.join(seconds)
        self.dropping = True
        self.thread.join()

    def _run(self):
        try:
            self._work()
        finally:
            # Wakes up waiters: this thread will never do so again.
            with self.changed:
                self.broken = True
                self.changed.notify_all()

    def _work(self):
        is_open = True
        while is_open:
            tasks = [self.tasks.get()]
            while not self.tasks.empty():
                tasks.append(self.tasks.get())
            is_open = tasks[-1] is not None
            complete = []
            for savings, layer, stream in tasks if is_open else tasks[:-1]:
                if layer is None:
                    complete += savings
                else:
                    for saving in savings:
                        self._start(saving, layer, stream)
            # One flush for all of them.
            self._end(complete)

    def _start(self, saving, layer, stream):
        if self.dropping:
            saving.error = saving.error or "it was dropped: the engine ends"
        if saving.error is not None:
            return
        try:
            if saving.job is None:
                saving.job = self.plane.begin_store(saving.files, saving.blocks)
            if self.schedule is not None:
                self._turn(saving, layer)
            self.plane.start(saving.job, layer, *stream)
        except ripieno.Error as error:
            saving.error = str(error)
            if isinstance(error, ripieno.ClosedError):
                self.dead = str(error)

    def _turn(self, saving, layer):
        """Waits until no load is in flight, and few saves are."""
        bytes = len(saving.blocks) * self.layer_bytes
        while self.flying and sum(it[2] for it in self.flying) + bytes > DEPTH_BYTES:
            job, before, _ = self.flying.popleft()
            try:
                self.plane.wait(job, before)
            except ripieno.Error:
                # The job reports the error when it ends.
                pass
        with self.changed:
            self.changed.wait_for(self._may_start)
        self.flying.append((saving.job, layer, bytes))

    def _may_start(self):
        is_full = sum(self.unfinished.values()) > self.schedule
        return not self.is_loading or self.is_wanted or is_full

    def _end(self, savings):
        jobs = [saving.job for saving in savings if saving.job is not None]
        try:
            reports = {report.job: report for report in self.plane.end(jobs)} if jobs else {}
        except ripieno.Error as error:
            self.dead, reports = str(error), {}
        self.flying = deque(it for it in self.flying if it[0] not in jobs)
        now = time.monotonic()
        ended = []
        for saving in savings:
            report = reports.get(saving.job)
            error = saving.error or (report.error if report else self.dead)
            checksums = report.checksums if report and error is None else None
            ended.append(
                Saved(saving.id, len(saving.blocks), now - saving.begun, checksums, error)
            )
        with self.changed:
            self.ended += ended
            for saving in savings:
                del self.unfinished[saving.id]
            self.changed.notify_all()
