"""Measurements, printed; only with RIPIENO_SOAK, on a machine that does nothing else."""

import json
import os
import shutil
import statistics
import time

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import tiny_model as models  # noqa: E402
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


def set_speed(store, read=200e6, write=75e6, mixed=0.4):
    """Gives the software controllers the speed of a drive, scaled to a CPU's layers. Mixed reads
    and writes have 0.4 of the bandwidth (Tutti, figure 6)."""
    for path in store.rglob("home.json"):
        found = json.loads(path.read_text())
        speed = {"read": read, "write": write, "latency_us": 80, "mixed": mixed}
        path.write_text(json.dumps(found | {"speed": speed}))


def timed(engine, names):
    """Runs until all requests have ended. Returns the time of each token, by request."""
    said = {name: [] for name in names}
    while not all(engine.answers[name].finished for name in names):
        engine.step()
        now = time.perf_counter()
        for name, times in said.items():
            times += [now] * (len(engine.answers[name].tokens) - len(times))
    return said


def report(capsys, took):
    """Prints quartiles, because other programs use the machine, too."""
    with capsys.disabled():
        for at, what in enumerate(("TTFT", "between tokens")):
            for name, times in took.items():
                quartiles = statistics.quantiles([each[at] for each in times])
                print(f"\n{what}, ms, {name}: {[round(time * 1e3, 1) for time in quartiles]}")


def paced_and_not(tmp_path, ask, turns, speed, blocks=1024):
    """Returns the times that ask() finds in each of several engines, which alternate."""
    models.make(tmp_path / "model", layers=8, hidden=256, heads=8)
    took = {"in order": [], "paced": []}
    for turn in range(turns):
        for name, times in took.items():
            path = tmp_path / f"{name} {turn}"
            settings = {
                "model": tmp_path / "model",
                "max_model_len": 4096,
                "max_num_batched_tokens": 1024,
                "num_gpu_blocks_override": blocks,
                "options": {
                    "path": str(path),
                    "capacity": "1GiB",
                    "pacing": name == "paced",
                    "load_async": os.environ.get("RIPIENO_ASYNC") == "1",
                },
            }
            live(lambda engine: engine.ask(tokens(32), max_tokens=1), **settings)
            if speed is not None:
                set_speed(path, **speed)
            times += live(ask, **settings)
            shutil.rmtree(path)
    return took


SPEEDS = {"drive": {}, "duplex": {"mixed": 2.0}, "file": None}


@pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
def test_saves_that_go_after_loads_make_no_token_later(tmp_path, capsys, speed):
    """Prompts with 2,016 stored tokens and 300 new ones, one at a time."""
    stored = tokens(2016)

    def ask(engine):
        engine.ask(stored, max_tokens=1)
        times = []
        for _ in range(7):
            # Saves of the previous prompt are still in flight.
            assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
            start = time.perf_counter()
            name = engine.add(stored + tokens(300), max_tokens=12)
            said = timed(engine, [name])[name]
            times.append((said[0] - start, (said[-1] - said[0]) / (len(said) - 1)))
        return times[1:]

    report(capsys, paced_and_not(tmp_path, ask, 3, speed))


@pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
def test_eight_conversations(tmp_path, capsys, speed):
    """Eight conversations of five turns, four at a time: each loads what its turns before it stored,
    while those of the others are stored. A turn has 200 new tokens, and 24 are answered."""

    def ask(engine):
        history = [tokens(400) for _ in range(8)]
        times, open_, turns = [], {}, [0] * 8
        while min(turns) < 5 or open_:
            # Four users think while those of the others are answered.
            for one in sorted(range(8), key=turns.__getitem__):
                if turns[one] < 5 and one not in open_.values() and len(open_) < 4:
                    history[one] += tokens(200)
                    name = engine.add(history[one], name=f"{one} {turns[one]}", max_tokens=24)
                    open_[name], turns[one] = one, turns[one] + 1
                    times.append([name, time.perf_counter(), None, None])
            before = {name: len(engine.answers[name].tokens) for name in open_}
            engine.step()
            now = time.perf_counter()
            for entry in times:
                if entry[0] in open_ and len(engine.answers[entry[0]].tokens) > before[entry[0]]:
                    entry[2], entry[3] = entry[2] or now, now
            for name in [name for name in open_ if engine.answers[name].finished]:
                history[open_.pop(name)] += engine.answers[name].tokens
        cached = [engine.answers[name].cached for name, *_ in times[8:]]
        assert engine.plane.loaded > 0.5 * sum(cached) / BLOCK, "vLLM evicted most of them"
        return [(first - start, (last - first) / 23) for _, start, first, last in times[8:]]

    report(capsys, paced_and_not(tmp_path, ask, 3, speed, blocks=210))


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
