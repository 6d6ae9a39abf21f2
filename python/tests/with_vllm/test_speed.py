"""Measurements, printed; only with RIPIENO_SOAK, on a machine that does nothing else."""

import os
import statistics
import threading
import time
from collections import deque

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import model as models  # noqa: E402
from forked import live  # noqa: E402
from prompts import BLOCK, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(
    "RIPIENO_SOAK" not in os.environ, reason="measures time: set RIPIENO_SOAK=1"
)


def test_loads_overlap_with_what_is_computed(tmp_path, capsys):
    """2,000 stored and 1,000 new tokens; each layer's load takes 100 ms more. Runs alternate."""
    models.make(tmp_path / "model", layers=8, hidden=1024, heads=8)
    stored = tokens(2016)

    def ask(engine):
        engine.ask(stored, max_tokens=1)
        took = {0: [], 0.1: []}
        for _ in range(7):
            for engine.plane.seconds, times in took.items():
                engine.forget()
                start = time.perf_counter()
                engine.ask(stored + tokens(1000), max_tokens=1)
                times.append(time.perf_counter() - start)
        return took

    for load_async in (False, True):
        # A store each: both ask the same prompts.
        path = tmp_path / f"store-{load_async}"
        took = live(
            ask,
            model=tmp_path / "model",
            options={"path": str(path), "capacity": "2GiB", "load_async": load_async},
            plane=faults.Late,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            num_gpu_blocks_override=256,
        )
        at_once, late = map(statistics.median, took.values())
        with capsys.disabled():
            print(f"\nload_async={load_async}: {at_once:.3f} s, delayed {late:.3f} s")
            print(f"ratio {late / at_once:.3f}, all: {took}")
        if not load_async:
            assert late <= 1.1 * at_once


class Drive(faults.Plane):
    """A drive scaled to the speed of a CPU's layers. Eight operations are in flight, in order;
    mixed reads and writes have 0.4 of the bandwidth (Tutti, figure 6)."""

    READ, WRITE, MIXED, WINDOW = 200e6, 75e6, 0.4, 8

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ops, self.left, self.changed = deque(), {}, threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, job, layer):
        self.real.start(job, layer)
        is_load = job in self.loads
        blocks = self.loads[job][0] if is_load else self.stores[job]
        seconds = len(blocks) * self.shape.object_bytes / (self.READ if is_load else self.WRITE)
        with self.changed:
            self.left[job, layer] = seconds
            self.ops.append((job, layer, is_load))
            self.changed.notify_all()

    def _run(self):
        now = time.monotonic()
        while True:
            with self.changed:
                if not self.ops:
                    self.changed.wait()
                    now = time.monotonic()
                now, before = time.monotonic(), now
                window = [self.ops[at] for at in range(min(self.WINDOW, len(self.ops)))]
                both = len({is_load for _, _, is_load in window}) > 1
                work = (now - before) * (self.MIXED / 2 if both else 1)
                for direction in (True, False):
                    todo = work
                    for op in [op for op in window if op[2] == direction]:
                        done = min(todo, self.left[op[:2]])
                        self.left[op[:2]] -= done
                        todo -= done
                        if self.left[op[:2]] <= 0:
                            del self.left[op[:2]]
                            self.ops.remove(op)
                self.changed.notify_all()
            time.sleep(0.0005)

    def wait(self, job, layer):
        with self.changed:
            self.changed.wait_for(lambda: (job, layer) not in self.left)
        super().wait(job, layer)

    def poll(self, job, layer):
        with self.changed:
            is_over = (job, layer) not in self.left
        return is_over and super().poll(job, layer)

    def end(self, jobs):
        with self.changed:
            self.changed.wait_for(lambda: not any(job in jobs for job, _ in self.left))
        return super().end(jobs)


@pytest.mark.parametrize("plane", [Drive, faults.Plane], ids=["drive", "file"])
def test_saves_that_go_after_loads_make_no_token_later(tmp_path, capsys, plane):
    """Prompts with 2,016 stored tokens and 300 new ones, one at a time. Settings alternate."""
    models.make(tmp_path / "model", layers=8, hidden=256, heads=8)
    stored, turns, each = tokens(2016), 12, 3

    def ask(engine):
        engine.ask(stored, max_tokens=1)
        saver = engine.worker.saver
        schedule = saver.schedule
        found = {None: [], schedule: []}
        for _ in range(turns):
            for saver.schedule, times in found.items():
                engine.settle()
                for _ in range(each):
                    # Saves of the previous prompt are still in flight.
                    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
                    name, said = engine.add(stored + tokens(300), max_tokens=12), []
                    start = time.perf_counter()
                    while not engine.answers[name].finished:
                        engine.step()
                        said += [time.perf_counter()] * (
                            len(engine.answers[name].tokens) - len(said)
                        )
                    times.append((said[0] - start, (said[-1] - said[0]) / (len(said) - 1)))
                saver.give_way(False)
        return found

    took = live(
        ask,
        model=tmp_path / "model",
        options={"path": str(tmp_path / "store"), "capacity": "2GiB", "schedule": True},
        plane=plane,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=1024,
    )
    # Quartiles, because other programs use the machine, too.
    first, later = (
        [statistics.quantiles([it[at] for it in each]) for each in took.values()] for at in (0, 1)
    )
    with capsys.disabled():
        for what, (at_once, after) in (("TTFT", first), ("between tokens", later)):
            ms = [[round(time * 1e3, 1) for time in times] for times in (at_once, after)]
            print(f"\n{what}, ms: saves at once {ms[0]}, after loads {ms[1]}")
    assert first[1][0] <= 1.05 * first[0][0]


def test_a_lookup_takes_less_than_a_millisecond(tmp_path, capsys):
    """8,192 blocks in the scheduler, all of them stored."""
    models.make(tmp_path / "model", layers=1, hidden=64, heads=2, positions=1 << 19)
    blocks = 8192

    def ask(engine):
        engine.add(tokens(blocks * BLOCK + 1))
        (request,) = engine.scheduler.waiting
        connector = engine.scheduler.connector
        half = connector._scheduler
        keys = [bytes(key) for key in request.block_hashes]
        for at in range(0, blocks, 1024):
            write = half.catalog.begin(half.namespace, keys[at : at + 1024])
            half.catalog.written(write.id, 0, bytes(len(write.files) * 4))
            half.catalog.commit(write.id)
        times = []
        for _ in range(200):
            start = time.thread_time()
            found, _ = connector.get_num_new_matched_tokens(request, 0)
            times.append(time.thread_time() - start)
            assert found == blocks * BLOCK
        return times

    times = live(
        ask,
        model=tmp_path / "model",
        options={"path": str(tmp_path / "store"), "capacity": "256MiB"},
        max_model_len=blocks * BLOCK + 128,
        num_gpu_blocks_override=8400,
    )
    with capsys.disabled():
        print(f"\nfirst {times[0] * 1e3:.2f} ms, median {statistics.median(times) * 1e3:.3f} ms")
    assert statistics.median(times) < 1e-3
