"""Faults between the connector and the store: wrappers of ripieno.Plane and Catalog.

Each passes all calls on to the real one. A test uses a subclass that injects a fault.
"""

import ctypes
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy
import ripieno

_Plane, _Catalog = ripieno.Plane, ripieno.Catalog


def install(plane, catalog):
    ripieno.Plane, ripieno.Catalog = plane, catalog


@dataclass
class Report:
    job: int
    error: str | None
    checksums: bytes
    is_mismatch: bool


class Plane:
    """Counts blocks, and calls arrived() when a layer of a load has arrived."""

    made = []

    def __init__(self, path, rank, shape, pool, **options):
        self.real = _Plane(path, rank, shape, pool, **options)
        self.shape, self.pool = shape, pool
        self.memory = (ctypes.c_char * pool.length).from_address(pool.address)
        self.loads, self.stores = {}, {}
        """By job: its blocks, and for loads the layers that have not arrived."""
        self.loaded = self.stored = 0
        """Counts of blocks."""
        self.made.append(self)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def page(self, layer, block):
        """Returns a block's bytes in a layer in vLLM's layout: [heads, tokens, K and then V]."""
        at = self.pool.rows[layer] + block * self.pool.block_stride
        return numpy.frombuffer(self.memory, numpy.uint8, self.shape.object_bytes, at)

    def begin_load(self, files, blocks, checksums=None, **more):
        job = self.real.begin_load(files, blocks, checksums, **more)
        self.loads[job] = list(blocks), set(range(self.shape.layers))
        self.loaded += len(blocks)
        return job

    def begin_store(self, files, blocks):
        job = self.real.begin_store(files, blocks)
        self.stores[job] = list(blocks)
        self.stored += len(blocks)
        return job

    def wait(self, job, layer):
        self.real.wait(job, layer)
        self._arrived(job, layer)

    def poll(self, job, layer):
        done = self.real.poll(job, layer)
        if done:
            self._arrived(job, layer)
        return done

    def end(self, jobs):
        reports = self.real.end(jobs)
        for report in reports:
            for layer in range(self.shape.layers):
                self._arrived(report.job, layer)
        return [
            self.ended(Report(each.job, each.error, each.checksums, each.is_mismatch))
            for each in reports
        ]

    def _arrived(self, job, layer):
        blocks, layers = self.loads.get(job, ((), ()))
        if layer in layers:
            layers.remove(layer)
            self.arrived(blocks, layer)

    def arrived(self, blocks, layer):
        """Called when the layer's load is done."""

    def ended(self, report):
        """Returns the report of a load or store, for subclasses to change."""
        return report


class Corrupt(Plane):
    """Overwrites a page of each load."""

    def arrived(self, blocks, layer):
        page = self.page(layer, blocks[0]).view(numpy.float32)
        page[:] = numpy.random.default_rng(1).standard_normal(page.size)


class SwappedV(Plane):
    """Swaps K and V."""

    def arrived(self, blocks, layer):
        for block in blocks:
            page = self.page(layer, block).view(numpy.float32).reshape(-1, 2, 32)
            page[:] = page[:, ::-1].copy()


class ShiftedRows(Plane):
    """Moves each layer's bytes to the row of the next layer."""

    def __init__(self, path, rank, shape, pool, **options):
        shifted = replace(pool, rows=[*pool.rows[1:], pool.rows[0]])
        super().__init__(path, rank, shape, shifted, **options)


class Idle(Plane):
    """Undoes loads: the blocks keep their bytes."""

    def begin_load(self, files, blocks, checksums=None, **more):
        layers = range(self.shape.layers)
        self.before = {(layer, b): self.page(layer, b).copy() for layer in layers for b in blocks}
        return super().begin_load(files, blocks, checksums, **more)

    def arrived(self, blocks, layer):
        for block in blocks:
            self.page(layer, block)[:] = self.before[layer, block]


class SwappedBlocks(Plane):
    """Swaps two blocks of a load."""

    def arrived(self, blocks, layer):
        one, other = self.page(layer, blocks[0]), self.page(layer, blocks[-1])
        one[:], other[:] = other.copy(), one.copy()


class LoadsFail(Plane):
    """Fails the first load at its end, and leaves poisoned bytes."""

    def arrived(self, blocks, layer):
        if self.loaded == len(blocks):
            for block in blocks:
                self.page(layer, block).view(numpy.float32)[:] = numpy.nan

    def ended(self, report):
        if report.job == next(iter(self.loads), None):
            report.error = "a load failed because a test says so"
        return report


class SavesFail(Plane):
    """Fails all stores of the last rank."""

    def __init__(self, path, rank, shape, pool, **options):
        super().__init__(path, rank, shape, pool, **options)
        self.fails = rank.rank == rank.ranks - 1

    def ended(self, report):
        if self.fails and report.job in self.stores:
            report.error = "a store failed because a test says so"
        return report


class Late(Plane):
    """Delays each layer's load by `seconds`, one after the other, and the begin of each store by
    `store_seconds`."""

    seconds = 0.1
    store_seconds = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.due, self.last = {}, 0

    def begin_store(self, files, blocks):
        time.sleep(self.store_seconds)
        return super().begin_store(files, blocks)

    def start(self, job, layer):
        self.real.start(job, layer)
        if job in self.loads:
            self.last = self.due[job, layer] = max(self.last, time.monotonic()) + self.seconds

    def wait(self, job, layer):
        time.sleep(max(0, self.due.get((job, layer), 0) - time.monotonic()))
        super().wait(job, layer)

    def poll(self, job, layer):
        return self.due.get((job, layer), 0) <= time.monotonic() and super().poll(job, layer)

    def end(self, jobs):
        due = [at for (job, _), at in self.due.items() if job in jobs]
        time.sleep(max([0, *(at - time.monotonic() for at in due)]))
        return super().end(jobs)


class Held(Plane):
    """Holds each layer of a store until may_go is set, or for `seconds`."""

    seconds = 60

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.may_go = threading.Event()
        self.may_go.set()

    def start(self, job, layer):
        if job in self.stores:
            self.may_go.wait(self.seconds)
        self.real.start(job, layer)


class Lazy(Plane):
    """Starts the layers of loads only when end() is called."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = []

    def start(self, job, layer):
        if job in self.loads:
            self.asked.append((job, layer))
        else:
            self.real.start(job, layer)

    def end(self, jobs):
        for job, layer in self.asked:
            self.real.start(job, layer)
        self.asked.clear()
        return super().end(jobs)


class Catalog:
    """Counts calls, by name."""

    def __init__(self, path):
        self.real = _Catalog(path)
        self.calls = Counter()

    def __getattr__(self, name):
        real = getattr(self.real, name)
        if not callable(real):
            return real

        def call(*args, **named):
            self.calls[name] += 1
            self.called(name)
            value = real(*args, **named)
            self.returned(name)
            return value

        return call

    def called(self, name):
        """Called before each call of the real one."""

    def returned(self, name):
        """Called after each call of the real one."""


def killed_at(name, count, after=False):
    """Returns a Catalog class that kills its process before or after a method's count-th call."""

    class Killer(Catalog):
        def kill(self, called):
            if called == name and self.calls[name] == count:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(Killer, "returned" if after else "called", Killer.kill)
    return Killer
