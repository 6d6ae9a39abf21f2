"""Models with several KV cache groups: killed engines, preemption, aborts and salts."""

import os
import signal

import faults
import pytest

pytest.importorskip("vllm")

from forked import life_of, live  # noqa: E402
from hybrids import ALONE, alone, computed, filled, hybrid  # noqa: E402, F401
from prompts import tokens  # noqa: E402
from test_schedule import Slow, ask_and_count, is_idle  # noqa: E402

soak = pytest.mark.skipif("RIPIENO_SOAK" not in os.environ, reason="slow: set RIPIENO_SOAK=1")
# Qwen3-Next takes minutes for each of these tests on a CPU.
MODELS = ["gemma3", pytest.param("lfm2", marks=soak)]
pytestmark = pytest.mark.parametrize("hybrid", MODELS, indirect=True)


def is_exact(settings):
    """True if vLLM computes the same bytes wherever chunks and batches end."""
    return settings["model"].name == "gemma3"


def check_answers(answers, computed, settings):
    """Checks the bytes of all that was loaded, and the tokens."""
    first, pages, _ = computed
    for asked in answers:
        assert asked.loaded.items() <= pages.items(), "bytes"
        assert bool(asked.loaded) == (asked.cached > 0)
    if is_exact(settings):
        assert [asked.said for asked in answers] == first, "tokens"


@pytest.mark.parametrize(
    ("name", "count", "after"),
    # Before blocks are written, between data and commit, and when the first prompt is durable.
    [("begin", 2, False), ("commit", 2, False), ("commit", 3, True), ("sync", 3, True)],
)
def test_an_engine_that_is_killed(name, count, after, hybrid, computed, options):
    settings = {"options": options} | hybrid
    killer = faults.killed_at(name, count, after)
    assert life_of(alone, catalog=killer, **settings).signal == signal.SIGKILL
    answers = live(alone, **settings)
    check_answers(answers, computed, hybrid)
    if (name, after) == ("sync", True):
        assert any(each.cached for each in answers), "what was permanent is found"
    # All of it is there now.
    answers = live(alone, **settings)
    assert [each.cached for each in answers] == [cached for _, (cached,) in computed[2]]
    check_answers(answers, computed, hybrid)


def test_preempted_requests_and_blocks_that_are_used_again(hybrid, options):
    some = [tokens(200) for _ in range(4)]
    blocks = {"gemma3": 60, "lfm2": 30}[hybrid["model"].name]
    few = hybrid | {"num_gpu_blocks_override": blocks, "max_model_len": 704}

    def ask(engine):
        return ask_and_count(engine, some)

    def ask_and_look(engine):
        answer = ask(engine)
        is_idle(engine)
        return answer

    said, preempted = live(ask, **few)
    assert preempted >= 1
    for _ in range(2):
        again, preempted = live(ask_and_look, options=options, plane=Slow, **few)
        assert preempted >= 1
        assert [len(each) for each in again] == [120] * 4
        # The last bits of the others depend on where chunks begin.
        assert again == said or not is_exact(hybrid)


def test_a_request_is_aborted_at_each_step(hybrid, computed, filled, options):
    """Aborts before, during and after load, compute and store."""

    def ask(engine):
        for steps in range(8):
            gone = engine.add(ALONE[1], name=f"gone {steps}")
            fresh = engine.add(ALONE[0] + tokens(300), name=f"fresh {steps}")
            stays = engine.add(ALONE[2], name=f"stays {steps}")
            for _ in range(steps):
                engine.step()
            engine.llm.abort_request([gone, fresh])
            engine.run()
            assert len(engine.answers[stays].tokens) == 24
            is_idle(engine)
            engine.forget()
        return alone(engine)

    answers = live(ask, options=filled, plane=Slow, **hybrid)
    assert [each.cached for each in answers] == [cached for _, (cached,) in computed[2]]
    check_answers(answers, computed, hybrid)


def test_salts_keep_tenants_apart(hybrid, computed, options):
    whole = computed[2][1][1][0]

    def ask(engine, *salts):
        cached = []
        for salt in salts:
            cached += engine.ask(ALONE[1], salt=salt)[1]
            engine.forget()
        return cached

    assert live(ask, "a", options=options, **hybrid) == [0]
    assert live(ask, "b", None, "a", options=options, **hybrid) == [0, 0, whole]
