"""Measurements, printed; only with RIPIENO_SOAK, on a machine that does nothing else."""

import os
import statistics
import time

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
    """2,000 stored and 1,000 new tokens; each layer's load takes 100 ms more. In turns."""
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
        # A store each: both ask the same.
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
