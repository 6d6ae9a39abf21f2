"""A load or a store that failed costs time, and never a wrong token."""

import pathlib
import random

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
from forked import life_of, live, metric  # noqa: E402
from prompts import PROMPTS, RANKS, SHARED, STORED, tokens_of  # noqa: E402
from ripieno import ClosedError  # noqa: E402


def ask_first(engine):
    """Asks a prompt whose load may fail, together with an unrelated one."""
    first, other = engine.add(PROMPTS[0]), engine.add(PROMPTS[4])
    engine.run()
    reason = engine.answers[first].output.outputs[0].finish_reason
    return reason, engine.answers[first].tokens, engine.answers[other].tokens


def test_a_request_whose_load_fails_ends_with_an_error(model, stored, said):
    reason, _, other = live(ask_first, model=model, options=stored, plane=faults.LoadsFail)
    assert (reason, other) == ("error", said[4])
    # No block of it was stored or stayed in the cache.
    assert live(tokens_of, model=model, options=stored)[0] == said


def test_or_is_computed_again(model, stored, said):
    def twice(engine):
        return ask_first(engine), engine.ask(PROMPTS[0])[0]

    settings = {"model": model, "options": stored, "policy": "recompute"}
    first, again = live(twice, plane=faults.LoadsFail, **settings)
    assert first == ("length", said[0], said[4])
    assert again == [said[0]]
    assert live(tokens_of, **settings)[0] == said


@pytest.mark.parametrize("steps", (0, 1, 3, 5))
def test_another_request_meets_the_recomputation(steps, model, stored, said):
    """It must not find the blocks that were not loaded and are not computed yet."""

    def meet(engine):
        one = engine.add(PROMPTS[3])
        while not engine.plane.loaded:
            engine.step()
        for _ in range(steps):
            engine.step()
        other = engine.add(PROMPTS[3])
        engine.run()
        return engine.answers[one].tokens, engine.answers[other].tokens

    settings = {"model": model, "options": stored, "policy": "recompute"}
    # Small chunks, so that the other request fits into each step, too.
    settings["long_prefill_token_threshold"] = 64
    assert live(meet, plane=faults.LoadsFail, **settings) == (said[3], said[3])


class LastRankFails(faults.LoadsFail):
    """Fails the first load of the last rank only."""

    def __init__(self, path, rank, shape, pool, **options):
        super().__init__(path, rank, shape, pool, **options)
        self.fails = rank.rank == rank.ranks - 1

    def ended(self, report):
        return super().ended(report) if self.fails else report


@pytest.mark.parametrize("ranks", RANKS, ids=["tp2", "pp2"])
def test_a_load_that_fails_on_one_rank_is_computed_again_on_all(ranks, model, both, said):
    settings = {"model": model, "options": both, "policy": "recompute"} | ranks
    assert live(tokens_of, **settings)[0] == said
    life = life_of(tokens_of, plane=LastRankFails, **settings)
    assert (life.error, life.value[0]) == (None, said)
    assert "a load failed because a test says so" in life.said
    assert live(tokens_of, **settings) == (said, STORED)


def damage(store, seed):
    """Flips a bit in some pages on the disk."""
    chance = random.Random(seed)
    (medium,) = pathlib.Path(store).glob("*/rank-0/device-0.img")
    with medium.open("r+b") as image:
        for page in chance.sample(range(20), 5):
            at = (1 << 20) + (page << 16) + chance.randrange(1 << 16)
            image.seek(at)
            (byte,) = image.read(1)
            image.seek(at)
            image.write(bytes([byte ^ 0x40]))


def test_damaged_pages_are_misses(model, stored, said):
    damage(stored["path"], seed=1)
    settings = {"model": model, "options": stored, "policy": "recompute"}
    life = life_of(tokens_of, **settings)
    assert life.value[0] == said
    assert "retrieving layer" in life.said
    life = life_of(tokens_of, **settings)
    assert life.value == (said, STORED), "they were stored again"
    assert "retrieving layer" not in life.said


class Dies(faults.Plane):
    """After some loads and stores, every further one fails."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left = 2

    def attempt(self):
        self.left -= 1
        if self.left < 0:
            raise ClosedError("the device is gone because a test says so")

    def begin_load(self, *args, **options):
        self.attempt()
        return super().begin_load(*args, **options)

    def begin_store(self, *args):
        self.attempt()
        return super().begin_store(*args)

    def end(self, jobs):
        if self.left < 0:
            raise ClosedError("the device is gone because a test says so")
        return super().end(jobs)


def test_serving_goes_on_without_a_drive(model, stored, said):
    def ask(engine):
        first, _ = engine.ask(*PROMPTS)
        engine.forget()
        return first, *engine.ask(*PROMPTS), metric("vllm:ripieno_healthy")

    settings = {"model": model, "options": stored, "policy": "recompute"}
    life = life_of(ask, plane=Dies, **settings)
    # Only vLLM's own cache has blocks, from the prompts before.
    assert life.value == (said, said, SHARED, 0)
    assert life.said.count("serving goes on without the store") == 1


@pytest.mark.parametrize("ranks", RANKS, ids=["tp2", "pp2"])
def test_a_save_that_fails_on_one_rank_is_not_found(ranks, model, options, said):
    def settled(engine):
        answers = tokens_of(engine)
        # vLLM may end the workers before a save that is left to its shutdown.
        engine.settle()
        return answers

    settings = {"model": model, "options": options} | ranks
    life = life_of(settled, plane=faults.SavesFail, **settings)
    assert (life.error, life.value[0]) == (None, said)
    assert "a store failed" in life.said

    def twice(engine):
        first = tokens_of(engine)
        engine.forget()
        return first, tokens_of(engine)

    assert live(twice, **settings) == ((said, SHARED), (said, STORED))
