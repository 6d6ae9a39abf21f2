"""Models with several KV cache groups, what vLLM computes of them by itself, and a store with it.

Gemma 3 has sliding windows and full attention, LFM2 short convolutions and Qwen3-Next gated delta
nets with attention.
"""

from typing import NamedTuple

import faults
import gemma
import pytest
import recurrent
from forked import life_of, live
from prompts import PROMPTS, tokens

# No two share a prefix: which of them computed its blocks, in which chunks, would change the bytes.
ALONE = [PROMPTS[0], PROMPTS[3], PROMPTS[4], tokens(611)]


@pytest.fixture(scope="module", params=["gemma3", "lfm2", "qwen3_next"])
def hybrid(request, tmp_path_factory):
    """Settings of an engine, which depend on the model."""
    path = tmp_path_factory.mktemp("model") / request.param
    if request.param == "gemma3":
        gemma.make(path)
        return {"model": path}
    recurrent.make(request.param, path)
    settings = {"model": path, "mamba_cache_mode": "align"}
    if request.param == "qwen3_next":
        settings["dtype"] = "bfloat16"
        # Without a connector.
        if error := life_of(lambda engine: engine.ask(ALONE[2]), **settings).error:
            why = error.strip().splitlines()[-1]
            pytest.skip(f"vLLM's CPU backend does not run Qwen3-Next on this CPU: {why}")
    return settings


def twice(engine):
    """Asks each prompt, and again when vLLM has it in its own cache. Returns the first answers and
    all blocks, and the second answers and their cached tokens."""
    first, found = [], {}
    for prompt in ALONE:
        (said,), _ = engine.ask(prompt)
        first.append(said)
        found |= engine.pages()
    return first, found, [engine.ask(prompt) for prompt in ALONE]


@pytest.fixture(scope="module")
def computed(hybrid):
    """Result of twice, without a store."""
    return live(twice, **hybrid)


class Asked(NamedTuple):
    """Result of a prompt."""

    said: list
    cached: int
    blocks: dict
    """Digests of all blocks in vLLM's cache, by key."""
    loaded: dict
    """Those that were loaded."""
    count: int
    """Number of blocks that were loaded."""


def alone(engine):
    """Asks each prompt when vLLM's own cache is empty."""
    answers, plane = [], engine.plane
    for prompt in ALONE:
        before, count = set(plane.loads), plane.loaded
        (said,), (cached,) = engine.ask(prompt)
        ids = {block for job in plane.loads.keys() - before for block in plane.loads[job][0]}
        pages = engine.pages(), engine.pages(ids)
        answers.append(Asked(said, cached, *pages, plane.loaded - count))
        engine.forget()
    return answers


@pytest.fixture(scope="module")
def filled(hybrid, computed, tmp_path_factory):
    """Options of a store that has all prompts."""
    options = {"path": str(tmp_path_factory.mktemp("filled") / "store")}
    answers = live(alone, options=options, **hybrid)
    assert [each.said for each in answers] == computed[0]
    assert [each.cached for each in answers] == [0] * len(ALONE)
    return options


def check(hybrid, computed, filled, plane=faults.Plane):
    _, pages, second = computed
    answers = live(alone, options=filled, plane=plane, **hybrid)
    assert [each.cached for each in answers] == [cached for _, (cached,) in second], "hits"
    found = {key: page for each in answers for key, page in each.blocks.items()}
    assert found.items() <= pages.items(), "bytes"
    assert [[each.said] for each in answers] == [said for said, _ in second], "tokens"
    return answers
