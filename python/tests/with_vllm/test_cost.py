"""A hit is computed if loading it would take longer, and loaded again when the store is fast again.

Clocks are the tests' own, so that no result depends on this machine's speed.
"""

import itertools
import time
import types

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
from forked import life_of, metric  # noqa: E402
from prompts import PROMPTS, STORED, tokens  # noqa: E402
from ripieno.vllm import scheduler, times, worker  # noqa: E402
from ripieno.vllm.cost import MARGIN_SECONDS, PROBE_SECONDS, SAMPLES, Cost, Line  # noqa: E402
from ripieno.vllm.protocol import Reports  # noqa: E402

BLOCK_TOKENS = 32
TOKEN_SECONDS = 0.0001


def learned(block_seconds, constant=0.0, adds=False, samples=SAMPLES):
    """A model that has seen loads of several sizes, and computed 10,000 tokens per second."""
    model = Cost(adds)
    for at in range(samples):
        model.computed(1000 + at, (1000 + at) * TOKEN_SECONDS)
        blocks = 10 * (at + 1)
        model.loaded(blocks, blocks * BLOCK_TOKENS, constant + blocks * block_seconds)
    return model


names = map(str, itertools.count())


def declines(model, blocks, ahead=0, now=0.0):
    """Asks for a new request."""
    return model.is_declined(next(names), blocks * BLOCK_TOKENS, blocks, ahead, now)


COMPUTE = BLOCK_TOKENS * TOKEN_SECONDS
"""Seconds to compute a block."""


def test_what_is_faster_is_chosen():
    slow, fast = learned(2 * COMPUTE), learned(COMPUTE / 2)
    for model in slow, fast:
        model.probes_at = PROBE_SECONDS
    assert declines(slow, 100)
    assert not declines(fast, 100)
    # A difference that is not worth it.
    assert not declines(slow, int(MARGIN_SECONDS / COMPUTE) - 1)


def test_nothing_is_declined_before_both_are_known():
    for loads, steps in ((SAMPLES - 1, SAMPLES), (SAMPLES, SAMPLES - 1)):
        model = Cost(adds=False)
        for _ in range(steps):
            model.computed(1000, 0.1)
        for _ in range(loads):
            model.loaded(100, 3200, 1000.0)
        model.probes_at = PROBE_SECONDS
        assert not declines(model, 100)
        # Once more of what was missing.
        (model.loaded(100, 3200, 1000.0), model.computed(1000, 0.1))
        assert declines(model, 100)


def test_a_constant_is_worth_it_for_long_hits_only():
    model = learned(COMPUTE / 10, constant=1.0)
    model.probes_at = PROBE_SECONDS
    assert declines(model, 100)
    assert not declines(model, 1000)


def test_loads_ahead_are_waited_for_between_steps_only():
    apart, within = learned(COMPUTE / 2), learned(COMPUTE / 2, adds=True)
    assert declines(apart, 100, ahead=1000)
    assert not declines(within, 100, ahead=1000)
    # Those of the same step have paid the constant.
    within = learned(COMPUTE / 10, constant=1.0, adds=True)
    within.probes_at = PROBE_SECONDS
    assert declines(within, 100)
    assert not declines(within, 100, ahead=10)


def test_a_probe_comes_after_its_time_and_not_behind_another_load():
    model = learned(100 * COMPUTE)
    assert not declines(model, 100, now=5.0), "no load tells how it is now"
    assert declines(model, 100, now=5.0)
    assert declines(model, 100, now=4.9 + PROBE_SECONDS)
    assert declines(model, 100, ahead=1, now=6.0 + PROBE_SECONDS)
    assert not declines(model, 100, now=6.0 + PROBE_SECONDS)
    assert declines(model, 100, now=7.0 + PROBE_SECONDS)


def test_one_fast_probe_is_enough():
    model = learned(100 * COMPUTE, samples=20)
    model.probes_at = PROBE_SECONDS
    model.loaded(100, 3200, 99 * 100 * COMPUTE)
    assert declines(model, 100), "a slow one is not"
    model.loaded(100, 3200, COMPUTE)
    assert not declines(model, 100)


def test_a_store_that_becomes_slow_is_noticed():
    model = learned(COMPUTE / 10, samples=50)
    loads = 0
    while not declines(model, 100, now=0.0):
        model.loaded(100, 3200, 10 * 100 * COMPUTE)
        loads += 1
    assert 1 <= loads <= 3


def test_a_request_that_waits_keeps_its_decision():
    model = learned(100 * COMPUTE)
    asked = "r", 3200, 100, 0
    assert not model.is_declined(*asked, now=5.0)
    assert not model.is_declined(*asked, now=6.0)
    other = "s", *asked[1:]
    assert model.is_declined(*other, now=6.0)
    assert model.is_declined(*other, now=6.0 + PROBE_SECONDS)
    del model.declined["s"]
    assert not model.is_declined(*other, now=6.0 + PROBE_SECONDS)


@pytest.mark.parametrize("sizes", [[100], [99, 100, 101], [100, 101], [1, 1000]])
def test_noise_is_not_extrapolated(sizes):
    """Neither a rate nor a constant is negative, whatever the samples are."""
    line = Line()
    for at, size in enumerate(sizes * 10):
        line.add(size, 1.0 if at % 2 else 5.0)
    for small, large in ((1, 10), (10, 10_000)):
        assert 0 <= line.at(small) <= line.at(large) <= line.at(small) * large / small * 1.000001


def test_the_slowest_rank_counts():
    one, other = Reports(waited={1: 0.5, 2: 3.0}), Reports(waited={1: 2.0, 3: 1.0})
    both = {1: 2.0, 2: 3.0, 3: 1.0}
    assert one.aggregate(other).waited == other.aggregate(one).waited == both


class Mark:
    """A CUDA event of a stream that is at `now`."""

    now = 0.0

    def __init__(self, at):
        self.at = at

    def query(self):
        return self.at <= Mark.now

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


def test_times_of_steps_that_a_gpu_has_not_computed_come_later():
    ats = iter([1.0, 3.0, 3.0, 6.0, 7.0])
    steps = times.StepTimes(lambda: Mark(next(ats)))
    for count in (256, 0, 300, 256):
        steps.begin(count)
        if count != 256 or not steps.ended:
            steps.end()
    Mark.now = 2.0
    assert steps.take() == []
    Mark.now = 5.0
    assert steps.take() == [(256, 2.0)]
    Mark.now = 9.0
    assert steps.take() == [(300, 3.0)], "not one that has no end"


# In vLLM.

SECONDS = 1000
"""Of a slow layer. A fast load takes less than STEP_SECONDS on any machine."""
STEP_SECONDS = 30
"""Of a step that computes."""


class Slow(faults.Plane):
    """Loads are slow while `is_slow` is set, by the clocks of the worker."""

    is_slow, passed = True, 0
    """Seconds that the clock has gained."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.asked = set()

    def wait(self, job, layer):
        super().wait(job, layer)
        Slow.passed += SECONDS * Slow.is_slow

    def poll(self, job, layer):
        if Slow.is_slow and (job, layer) not in self.asked:
            self.asked.add((job, layer))
            Slow.passed += SECONDS
            return False
        return super().poll(job, layer)


class Clock:
    """Of the scheduler."""

    now = 0


@pytest.fixture
def clocks(monkeypatch):
    def clock(module, **functions):
        functions = {"time_ns": time.time_ns, "sleep": time.sleep} | functions
        monkeypatch.setattr(module, "time", types.SimpleNamespace(**functions))

    clock(worker, monotonic=lambda: time.monotonic() + Slow.passed)
    clock(scheduler, monotonic=lambda: Clock.now)
    marks = itertools.count(step=STEP_SECONDS)
    clock(times, perf_counter=lambda: next(marks))


def hits(engine, count):
    """Asks the stored prompt again and again. Returns its answers, and each one's cached tokens."""
    answers, cached = [], []
    for _ in range(count):
        engine.forget()
        (said,), (found,) = engine.ask(PROMPTS[3])
        answers.append(said)
        cached.append(found)
    return answers, cached


def slow_and_fast(engine):
    # Computing is learned: two steps of 256 tokens each.
    for prompt in (tokens(517), PROMPTS[3]):
        engine.ask(prompt)
    found = {}
    found["learns"] = hits(engine, SAMPLES)
    loads = len(engine.plane.loads)
    found["declines"] = hits(engine, 2)
    assert len(engine.plane.loads) == loads, "no load begins"
    found["counted"] = metric("vllm:ripieno_missed_tokens_total", reason="declined")
    Clock.now += PROBE_SECONDS
    found["probes"] = hits(engine, 2)
    Slow.is_slow = False
    Clock.now += PROBE_SECONDS
    found["fast again"] = hits(engine, SAMPLES + 3)
    engine.settle()
    assert not engine.connector.cost.declined, "requests that have ended are forgotten"
    return found


def check(found, said, life):
    whole = STORED[3]
    cached = {name: each[1] for name, each in found.items() if name != "counted"}
    assert cached == {
        "learns": [whole] * SAMPLES,
        "declines": [0, 0],
        "probes": [whole, 0],
        "fast again": [whole] * (SAMPLES + 3),
    }
    assert found["counted"] == 2 * whole
    for name in cached:
        assert all(answer == said[3] for answer in found[name][0])
    assert life.said.count("the store is slow") == 1


def test_a_slow_store_is_not_waited_for(model, both, said, clocks):
    life = life_of(slow_and_fast, model=model, options=both, plane=Slow, declines=True)
    assert life.error is None, f"{life.error}\n{life.said[-6000:]}"
    check(life.value, said, life)
