"""Models with several KV cache groups: blocks found in the store are those that vLLM computed.

vLLM's own prefix cache says how long a hit is, and which tokens follow.
"""

import random

import faults
import pytest

pytest.importorskip("vllm")

import gemma  # noqa: E402
from forked import life_of, live  # noqa: E402
from hybrids import ALONE, alone, check, computed, filled, hybrid, twice  # noqa: E402, F401
from prompts import BLOCK, PROMPTS, RANKS, tokens  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402


def sizes(engine):
    """Returns what each group needs of a hit: tokens of a block, and of a window or state."""
    found = []
    for group in engine.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        state = 1 if type(spec).__name__ == "MambaSpec" else None
        found.append((spec.block_size, window - 1 if window else state))
    return found


def test_hits_are_those_of_vllm_and_load_no_block_too_many(hybrid, computed, filled):
    groups = live(sizes, **hybrid)
    assert len(groups) > 1
    for asked in check(hybrid, computed, filled):
        cached = asked.cached
        needed = [-(-min(tail or cached, cached) // size) for size, tail in groups]
        assert asked.count == sum(needed)


def test_a_shared_prefix_is_found_the_third_time(hybrid, options):
    """The second request stores what a hit needs at the prefix's end."""
    begin = tokens(640)

    def ask(engine):
        cached = []
        for _ in range(3):
            cached += engine.ask(begin + tokens(300))[1]
            engine.forget()
        return cached

    units = [size for size, _ in live(sizes, **hybrid)]
    first, second, third = live(ask, options=options, **hybrid)
    assert (first, third) == (0, 640 // max(units) * max(units))
    assert second < third


def test_hashes_finer_than_blocks(hybrid, options):
    """With --prefix-match-unit a block has several hashes, and the last one identifies it. pegaflow
    0.24.2 took the list for one of a hash each (pegaflow #450): prompts that share the first tokens
    of a block got each other's."""
    settings = hybrid | {"prefix_match_unit": 16}
    unit = max(size for size, _ in live(sizes, **hybrid))
    shared = tokens(unit + 16)
    prompts = [shared + tokens(unit) for _ in range(2)]

    def ask(engine, forget=True):
        answers = []
        for prompt in prompts:
            answers.append(engine.ask(prompt))
            if forget:
                engine.forget()
        return answers

    # Of vLLM's own cache: in other chunks, some tokens would be others.
    expected = live(lambda engine: [ask(engine, False), ask(engine, False)], **settings)[1]
    assert [cached for _, cached in expected] == [[2 * unit]] * 2
    live(ask, options=options, **settings)
    assert live(ask, options=options, **settings) == expected


class LeftOut(faults.Plane):
    """A block of each load keeps the bytes that it had."""

    at = 0

    def begin_load(self, files, blocks, checksums=None, **more):
        block = blocks[self.at]
        layers = range(self.shape.layers)
        self.before = block, [self.page(layer, block).copy() for layer in layers]
        return super().begin_load(files, blocks, checksums, **more)

    def arrived(self, blocks, layer):
        block, pages = self.before
        self.page(layer, block)[:] = pages[layer]


class LastLeftOut(LeftOut):
    """The last group is the one that another plane leaves alone."""

    at = -1


class Shifted(faults.Plane):
    """The last blocks of a load change places: a window is shifted by a block."""

    def arrived(self, blocks, layer):
        one, other = self.page(layer, blocks[-2]), self.page(layer, blocks[-1])
        one[:], other[:] = other.copy(), one.copy()


class OtherState(faults.Plane):
    """The first block of a load, a state, is that of the load before: of another boundary."""

    before = None

    def begin_load(self, files, blocks, checksums=None, **more):
        own, *rest = files
        files = [own if self.before is None else self.before, *rest]
        self.before = own
        # Without checksums, which would notice it.
        return super().begin_load(files, blocks, **more)


# SwappedBlocks exchanges the bytes of two groups.
FAULTS = {
    "gemma3": [LeftOut, Shifted, faults.SwappedBlocks],
    # Without the state, and without a block of attention.
    "lfm2": [LeftOut, LastLeftOut, OtherState, faults.SwappedBlocks],
    "qwen3_next": [OtherState, faults.SwappedBlocks],
}


def test_that_test_notices(hybrid, computed, filled):
    for plane in FAULTS[hybrid["model"].name]:
        with pytest.raises(AssertionError, match=r"^(bytes|tokens)"):
            check(hybrid, computed, filled, plane)


def keys_of(engine, group):
    """Returns the store's keys of a group's blocks in vLLM's cache, the first tokens first."""
    cache = engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    hashes = [key[:-4] for key in cache if int.from_bytes(key[-4:]) == group]
    return [key[:31] + bytes((group,)) for key in hashes]


def test_a_hit_ends_before_a_block_that_a_group_lacks(hybrid, computed, filled, options):
    """Each group in turn loses its last block: the hit is shorter, and the tokens are the same."""

    def lose(engine):
        found = []
        for group in range(len(engine.scheduler.kv_cache_config.kv_cache_groups)):
            first = engine.ask(ALONE[1])
            keys = keys_of(engine, group)
            engine.settle()
            catalog, space = engine.connector.catalog, engine.connector.namespace
            assert catalog.remove(space, keys[-1:]) == 1
            engine.forget()
            found.append((first, engine.ask(ALONE[1])))
            engine.forget()
        return found

    said, whole = computed[2][1][0], computed[2][1][1]
    live(alone, options=options, **hybrid)
    for first, second in live(lose, options=options, **hybrid):
        assert first == (said, whole)
        assert second[1] < whole
        # vLLM's answers of LFM2 depend on where chunks end, also without a connector.
        assert second[0] == said or hybrid["model"].name == "lfm2"


def test_a_load_that_fails_is_computed_again(hybrid, computed, filled):
    def again(engine):
        return [engine.ask(ALONE[0]), engine.ask(ALONE[0])]

    settings = {"options": filled, "plane": faults.LoadsFail} | hybrid
    said = [computed[0][0]]
    first, second = live(again, policy="recompute", **settings)
    assert (first[0], second[0]) == (said, said)

    def fail(engine):
        failed, other = engine.add(ALONE[0]), engine.add(ALONE[2])
        engine.run()
        reason = engine.answers[failed].output.outputs[0].finish_reason
        return reason, engine.answers[other].tokens

    reason, other = live(fail, **settings)
    assert reason == "error"
    assert len(other) == len(computed[0][2])


# vLLM's layers with a state do not run on several ranks of a CPU.
@pytest.mark.parametrize("hybrid", ["gemma3"], indirect=True)
@pytest.mark.parametrize("plane", [faults.Plane, faults.LoadsFail])
@pytest.mark.parametrize("ranks", RANKS, ids=["tp2", "pp2"])
def test_ranks_find_what_all_of_them_stored(ranks, plane, hybrid, computed, options):
    """Also if the first load fails on each rank."""

    def ask(engine):
        found = []
        for prompt in ALONE:
            found.append(engine.ask(prompt))
            engine.forget()
        return found

    settings = hybrid | {"options": options, "policy": "recompute"} | ranks
    first = live(ask, **settings)
    life = life_of(ask, plane=plane, **settings)
    second = life.value
    assert ("blocks did not arrive" in life.said) == (plane is faults.LoadsFail)
    assert [said for said, _ in second] == [said for said, _ in first]
    # vLLM counts what was found, also if it is computed again.
    assert [cached for _, cached in second] == [cached for _, cached in computed[2]]


# The last bits of the others depend on where chunks begin.
@pytest.mark.parametrize("hybrid", ["gemma3"], indirect=True)
def test_tokens_are_right_while_blocks_are_evicted(hybrid, options):
    """The store holds about two prompts of nine, which share prefixes of random lengths."""
    chance = random.Random(5)
    prompts = [PROMPTS[3][: chance.randrange(64, 500)] + tokens(60) for _ in range(9)]
    order = [chance.randrange(len(prompts)) for _ in range(40)]

    def ask(engine):
        found = []
        for at in order:
            (said,), (cached,) = engine.ask(prompts[at], max_tokens=6)
            found.append((said, cached))
            engine.forget()
        return found

    expected = live(ask, **hybrid)
    found = live(ask, options=options | {"capacity": "12MiB"}, **hybrid)
    assert [said for said, _ in found] == [said for said, _ in expected]
    assert sum(cached > 0 for _, cached in found) > 10


class Slow(faults.Late):
    """Saves are slower than computing."""

    seconds = 0.0
    store_seconds = 0.05


def test_saves_end_before_their_blocks_are_used_again(hybrid, computed, options):
    """The KV cache has room for few requests, and saves are late."""

    def crowd(engine):
        rest = [tokens(200 + 31 * n) for n in range(6)]
        for prompt in ALONE:
            engine.add(prompt)
            for other in rest:
                engine.add(other, max_tokens=8)
            engine.run()
        engine.settle()
        return engine.plane.stored

    blocks = {"gemma3": 90, "lfm2": 60, "qwen3_next": 20}[hybrid["model"].name]
    small = hybrid | {"num_gpu_blocks_override": blocks}
    assert live(crowd, options=options, plane=Slow, **small) > 0
    _, pages, _ = computed
    answers = live(alone, options=options, **hybrid)
    same = {key: page for each in answers for key, page in each.blocks.items()}
    assert any(each.cached for each in answers)
    # Batches change the last bits, and the store's blocks are those that were computed in them.
    assert same.keys() <= pages.keys()
    if hybrid["model"].name == "gemma3":
        assert same.items() <= pages.items()


def test_events_name_the_group(hybrid, options):
    def ask(engine):
        events, publisher = [], engine.scheduler.kv_event_publisher
        publisher.publish = lambda batch: events.extend(batch.events)
        engine.ask(ALONE[0])
        engine.settle()
        groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
        engine.connector.catalog.remove(engine.connector.namespace, keys_of(engine, groups - 1))
        engine.ask(ALONE[2])
        engine.settle()
        stored = [event for event in events if type(event).__name__ == "BlockStored"]
        known = {
            (it.group_idx, it.kv_cache_spec_kind, it.kv_cache_spec_sliding_window) for it in stored
        }
        assert len(known) == groups and all(kind for _, kind, _ in known), "as vLLM's own tell"
        told = [event for event in events if getattr(event, "medium", None) == "STORAGE"]
        kinds = [(type(each).__name__, each.group_idx, tuple(each.block_hashes)) for each in told]
        return groups, kinds

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    groups, events = live(ask, options=options, kv_events_config=config, **hybrid)
    assert {group for kind, group, _ in events if kind == "BlockStored"} == set(range(groups))

    def blocks(name):
        return [(group, hash) for kind, group, hashes in events if kind == name for hash in hashes]

    removed = blocks("BlockRemoved")
    assert removed
    assert all(group == groups - 1 for group, _ in removed)
    assert set(removed) <= set(blocks("BlockStored"))


def test_windows_in_the_only_group(options, tmp_path):
    """All blocks are stored while they are in the window, and a hit loads the last ones."""
    settings = {"model": tmp_path / "gemma3"}
    gemma.make(settings["model"], ["sliding_attention"] * gemma.LAYERS)
    said, pages, second = live(twice, **settings)
    live(alone, options=options, **settings)
    for asked, tokens_of, (_, (cached,)) in zip(
        live(alone, options=options, **settings), said, second, strict=True
    ):
        assert (asked.said, asked.cached) == (tokens_of, cached)
        assert asked.loaded.items() <= pages.items()
        assert asked.count <= -(-gemma.WINDOW // BLOCK) + 1


@pytest.mark.parametrize("hybrid", ["lfm2"], indirect=True)
def test_stored_blocks_have_nothing_of_what_was_there_before(hybrid, options):
    """Layers of a group may write less of a block than those of another one."""

    def ask(engine):
        for page in engine.worker.pages:
            page.fill_(0x5E)
        for prompt in ALONE:
            engine.ask(prompt)
        engine.settle()
        assert engine.connector.stored > 0
        pool = engine.scheduler.kv_cache_manager.block_pool
        blocks = sorted(block.block_id for block in pool.blocks if block.block_hash is not None)
        dirty = {
            block: row
            for block in blocks
            for row, page in enumerate(engine.worker.pages)
            if b"\x5e" * 64 in page[block].contiguous().numpy().tobytes()
        }
        return len(blocks), any(engine.worker.unwritten), dirty

    blocks, has_unwritten, dirty = live(ask, options=options, **hybrid)
    assert blocks > 10 and has_unwritten and not dirty
