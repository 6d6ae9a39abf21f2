"""What an index of prefixes knows from the events, over the lives of a store."""

import os
import signal
from itertools import count

import pytest

pytest.importorskip("vllm")

from forked import life_of, live  # noqa: E402
from prompts import BLOCK, PROMPTS, SHARED, STORED, whole  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402
from waiting import until  # noqa: E402

EVENTS = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
SHARED_BLOCKS = SHARED[1] // BLOCK
OTHER = list(range(100, 120))
"""Shorter than a block: nothing of it is stored."""


class Index:
    """The blocks in a store, by the chain of tokens that leads to them. A block that is removed
    takes along all below it, as in the trees of routers."""

    def __init__(self, engine):
        self.blocks, publisher = {}, engine.scheduler.kv_event_publisher
        publisher.publish = lambda batch: [self.apply(event) for event in batch.events]

    def apply(self, event):
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            self.blocks.clear()
        elif event.medium != "STORAGE":
            return
        elif kind == "BlockStored":
            before = event.parent_block_hash
            for at, hash in enumerate(event.block_hashes):
                self.blocks[hash] = before, event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                before = hash
        else:
            for hash in event.block_hashes:
                self.forget(hash)

    def forget(self, hash):
        self.blocks.pop(hash, None)
        for below in [each for each, (before, _) in self.blocks.items() if before == hash]:
            self.forget(below)

    def found(self, prompt):
        """Returns how many leading tokens of a prompt are in the store."""
        before, at = None, 0
        children = {(parent, tuple(tokens)): hash for hash, (parent, tokens) in self.blocks.items()}
        while hash := children.get((before, tuple(prompt[at : at + BLOCK]))):
            before, at = hash, at + BLOCK
        return at


def wholes(prompts):
    return [len(prompt) // BLOCK * BLOCK for prompt in prompts]


def fill(engine):
    index = Index(engine)
    for prompt in PROMPTS:
        engine.ask(prompt)
        engine.settle()
    return [index.found(prompt) for prompt in PROMPTS]


def fill_and_die(engine):
    blocks = sum(fill(engine)) // BLOCK - 2 * SHARED_BLOCKS
    # The thread that writes them is behind, and what it did not write is told by hits only.
    history = engine.connector.history
    kept = (sum(len(record.keys) for record in history._read()) for _ in count())
    until(lambda: next(kept) == blocks, "the events are not kept")
    os.kill(os.getpid(), signal.SIGKILL)


def path_of(options):
    (store,) = (each.path for each in os.scandir(options["path"]) if each.is_dir())
    return f"{store}/events"


def later(options, meanwhile=lambda engine: None):
    """Returns what an index knows that was there from a later engine's first step. meanwhile: done
    after the events were read, and before that step."""
    path = path_of(options)
    was = os.stat(path).st_ino

    def steps_of(engine):
        index = Index(engine)
        # The file is written anew when it has been read.
        until(lambda: os.stat(path).st_ino != was, "the events are not read")
        meanwhile(engine)
        engine.ask(OTHER, max_tokens=4)
        return [index.found(prompt) for prompt in PROMPTS]

    return steps_of


def test_a_restart_tells_what_is_stored(model, options):
    settings = {"model": model, "options": options} | EVENTS
    assert live(fill, **settings) == wholes(PROMPTS)
    path = path_of(options)
    assert os.stat(path).st_mode & 0o777 == 0o600, "it has the prompts' tokens"
    assert live(later(options), **settings) == wholes(PROMPTS)

    # The last record is cut off, as by a kill: the last prompt's only block.
    os.truncate(path, os.path.getsize(path) - 1)
    assert live(later(options), **settings) == [*wholes(PROMPTS[:-1]), 0]


def test_a_killed_engine_tells_what_was_stored(model, options):
    settings = {"model": model, "options": options} | EVENTS
    assert life_of(fill_and_die, **settings).signal == signal.SIGKILL

    steps_of = later(options)

    def ask(engine):
        return steps_of(engine), [engine.ask(prompt)[1][0] for prompt in PROMPTS]

    told, cached = live(ask, **settings)
    assert cached == STORED
    assert told == wholes(PROMPTS)


def test_blocks_that_are_gone_are_not_told(model, options):
    settings = {"model": model, "options": options} | EVENTS
    live(fill, **settings)

    def evict(engine):
        assert engine.connector.catalog.evict(1000, engine.connector.namespace)

    assert live(later(options, evict), **settings) == [0] * len(PROMPTS)
    assert live(later(options), **settings) == [0] * len(PROMPTS)


def test_a_hit_heals_an_index(model, options):
    """vLLM's own reset has an index forget all media of the engine."""

    def ask(engine):
        index = Index(engine)
        engine.ask(PROMPTS[3])
        engine.settle()
        assert index.found(PROMPTS[3]) == wholes(PROMPTS)[3]
        assert engine.llm.reset_prefix_cache()
        engine.ask(OTHER, max_tokens=4)
        assert index.found(PROMPTS[3]) == 0
        assert engine.ask(PROMPTS[3])[1] == [whole(PROMPTS[3])]
        return index.found(PROMPTS[3])

    assert live(ask, model=model, options=options, **EVENTS) == whole(PROMPTS[3])


def test_a_block_comes_back_with_those_below_it(model, options):
    def ask(engine):
        index, catalog = Index(engine), engine.connector.catalog
        prompt = PROMPTS[3]
        engine.ask(prompt)
        engine.settle()
        space, keys = engine.connector.namespace, list(index.blocks)
        assert catalog.remove(space, keys[2:3]) == 1
        engine.ask(OTHER, max_tokens=4)
        assert index.found(prompt) == 2 * BLOCK
        assert catalog.are_stored(space, keys) == [True, True, False] + [True] * (len(keys) - 3)
        engine.forget()
        assert engine.ask(prompt)[1] == [2 * BLOCK]
        engine.settle()
        return index.found(prompt)

    # Hashes as they are, which are the catalog's keys.
    whole_hashes = {"environment": {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}}
    settings = {"model": model, "options": options} | EVENTS | whole_hashes
    assert live(ask, **settings) == wholes(PROMPTS)[3]
