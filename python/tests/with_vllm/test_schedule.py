"""Preemption, aborts and eviction while blocks are loaded and stored."""

import os
import random

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
from forked import live  # noqa: E402
from prompts import BLOCK, PROMPTS, STORED, tokens  # noqa: E402

SOAK = int(os.environ.get("RIPIENO_SOAK", "1"))


class Slow(faults.Late):
    """Makes loads and stores take a few steps."""

    seconds = 0.02
    store_seconds = 0.1


def ask_and_count(engine, prompts):
    """Returns the tokens of answers of 120 tokens, and the number of preemptions."""
    preempted, scheduler = [], engine.scheduler
    real = scheduler._preempt_request
    scheduler._preempt_request = lambda *a, **k: (preempted.append(1), real(*a, **k))[1]
    said, _ = engine.ask(*prompts, max_tokens=120)
    return said, len(preempted)


def is_idle(engine):
    """Checks that vLLM holds no block and the connector no file."""
    engine.settle()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    half = engine.scheduler.connector._scheduler
    assert not (half.planned or half.loads or half.saves or half.reading or half.requests)


@pytest.mark.parametrize("pacing", [False, True])
def test_preempted_requests_and_blocks_that_are_used_again(model, both, pacing):
    """A preempted request's blocks are reused in the same step, even if they are still being
    stored."""
    some = [tokens(200) for _ in range(4)]
    both |= {"pacing": pacing}
    few = {"model": model, "num_gpu_blocks_override": 29, "max_model_len": 704}

    def ask(engine):
        return ask_and_count(engine, some)

    def ask_and_look(engine):
        answer = ask(engine)
        is_idle(engine)
        return answer

    said, preempted = live(ask, **few)
    assert preempted >= 2
    assert live(ask_and_look, options=both, plane=Slow, **few)[0] == said
    # The blocks stored by the first run are right.
    assert live(ask_and_look, options=both, plane=Slow, **few)[0] == said


def test_a_request_is_aborted_at_each_step(model, stored, said):
    """Aborts before, during and after load, compute and store. Another one shares its prefix."""

    def ask(engine):
        for steps in range(8):
            gone = engine.add(PROMPTS[0], name=f"gone {steps}")
            fresh = engine.add(PROMPTS[0] + tokens(300), name=f"fresh {steps}")
            stays = engine.add(PROMPTS[1], name=f"stays {steps}")
            for _ in range(steps):
                engine.step()
            engine.llm.abort_request([gone, fresh])
            engine.run()
            assert engine.answers[stays].tokens == said[1]
            is_idle(engine)
            engine.forget()
        return engine.ask(*PROMPTS)

    assert live(ask, model=model, options=stored, plane=Slow) == (said, STORED)


def test_blocks_that_were_evicted_are_computed_again(model, both):
    """The store is smaller than the blocks that it is given."""
    some = [tokens(300) for _ in range(12)]

    def ask(engine, prompts):
        answers = []
        for prompt in prompts:
            answers.append(engine.ask(prompt))
            engine.forget()
        return [said for (said,), _ in answers], [cached for _, (cached,) in answers]

    expected, _ = live(ask, some, model=model)
    small = {"model": model, "options": both | {"capacity": "16MiB"}}
    assert live(ask, some, **small) == (expected, [0] * 12)
    # In the same order, each would be evicted just before it is asked for.
    said, cached = live(ask, some[::-1], **small)
    assert said == expected[::-1]
    assert 0 in cached, "some were evicted"
    assert any(cached), "and some were not"


@pytest.mark.parametrize("budget", [96, 4096], ids=["chunks", "whole"])
def test_tails_go_before_heads_however_a_prompt_is_cut(budget, model, options, tmp_path):
    """A store that is too small keeps blocks that can be found."""
    one, other = [tokens(31 * BLOCK + 1) for _ in range(2)]

    def found(engine, *prompts):
        cached = []
        for prompt in prompts:
            cached += engine.ask(prompt)[1]
            engine.forget()
        counts = engine.connector.catalog.stats()
        return cached, counts.files, counts.stored

    settings = {"model": model, "max_num_batched_tokens": budget}
    cached, room, stored = live(found, one, other, one, options=options | LARGE, **settings)
    assert 31 < room < 62
    assert (cached, stored) == ([0, 0, (room - 31) * BLOCK], room), "all of the room is used"
    small = {"path": str(tmp_path / "small"), "capacity": "8MiB"}
    cached, room, stored = live(found, one, one, one, one, options=small, **settings)
    assert room < 31
    assert (cached, stored) == ([0] + [room * BLOCK] * 3, room)


LARGE = {"capacity": "14MiB"}


def test_a_store_that_is_full_of_blocks_in_use(model, options):
    """Blocks cannot be evicted while they are loaded, so new ones are not stored."""
    some, others = [[tokens(270) for _ in range(6)] for _ in range(2)]
    small = {"model": model, "options": options | {"capacity": "16MiB", "load_async": True}}
    expected = live(lambda engine: engine.ask(*some)[0] + engine.ask(*others)[0], model=model)
    live(lambda engine: engine.ask(*some), **small)

    def ask(engine):
        waiting = [engine.add(prompt) for prompt in some]
        engine.step()
        assert engine.plane.loaded
        said, _ = engine.ask(*others)
        answers = [engine.answers[name].tokens for name in waiting]
        is_idle(engine)
        engine.forget()
        return answers + said, engine.ask(*others)[0]

    class Slower(faults.Late):
        seconds = 0.25

    said, again = live(ask, plane=Slower, **small)
    assert (said, again) == (expected, expected[6:])


@pytest.mark.parametrize("seed", range(2 * SOAK))
def test_anything_may_happen(seed, model, both, said):
    """Requests come, go and are aborted at random, with few blocks and a small store."""

    def ask(engine):
        chance, open_, wrong = random.Random(seed), {}, []
        for step in range(150):
            if chance.random() < 0.2 and len(open_) < 6:
                which = chance.randrange(len(PROMPTS))
                open_[engine.add(PROMPTS[which], name=str(step))] = which
            if open_ and chance.random() < 0.05:
                name = chance.choice(list(open_))
                engine.llm.abort_request([name])
                del open_[name]
            engine.step()
            if step % 50 == 49:
                engine.run()
                engine.forget()
            for name in [name for name in open_ if engine.answers[name].finished]:
                which = open_.pop(name)
                if engine.answers[name].tokens != said[which]:
                    wrong.append((name, which))
        engine.llm.abort_request(list(open_))
        is_idle(engine)
        return wrong, engine.plane.loaded, engine.plane.stored

    class Random(faults.Late):
        def start(self, job, layer):
            self.seconds = random.Random(f"{seed} {job}").choice([0, 0, 0.001, 0.02])
            super().start(job, layer)

    options = both | {"capacity": "16MiB", "pacing": seed % 2 == 1}
    few = {"model": model, "options": options, "num_gpu_blocks_override": 40}
    wrong, loaded, stored = live(ask, plane=Random, **few)
    assert wrong == []
    assert loaded and stored
