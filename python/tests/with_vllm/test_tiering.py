"""vLLM's tiered offloading with ours as the secondary tier, on the CPU."""

import os
import pathlib
import shutil
import signal
import threading
import time
import uuid

import pytest

pytest.importorskip("vllm")

import forked  # noqa: E402
import gemma as gemmas  # noqa: E402
import host_tiering  # noqa: E402, F401
from prompts import BLOCK, PROMPTS, STORED, alone, tokens_of, whole  # noqa: E402
from ripieno import tiering  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.metrics.reader import get_metrics_snapshot  # noqa: E402

CHUNK = 4 * 32 * 8 * 2 * 32 * 4
"""Bytes of a block of the Llama: layers, tokens, heads, K and V, elements, bytes."""


def life_of(body, *args, model, store=None, cpu=128 * CHUNK, blocks=1, tiers=(), **settings):
    """Same as forked.life_of. store: options of the tier; cpu: bytes of vLLM's CPU tier; blocks:
    blocks per chunk; tiers: further ones."""
    name = uuid.uuid4().hex
    if store is not None:
        extra = {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "host_tiering",
            "cpu_bytes_to_use": cpu,
            "blocks_per_chunk": blocks,
            "self_describing_kv_events": True,
            "secondary_tiers": [
                {
                    "type": "RipienoTier",
                    "module_path": "ripieno.tiering",
                    "capacity": "64MiB",
                    **store,
                },
                *tiers,
            ],
        }
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            engine_id=name,
        )
    try:
        return forked.life_of(body, *args, model=model, **settings)
    finally:
        # vLLM leaves this file behind when it is killed.
        pathlib.Path(f"/dev/shm/vllm_offload_{name}.mmap").unlink(missing_ok=True)


def live(body, *args, **settings):
    """Returns the body's result and the engine's output."""
    life = life_of(body, *args, **settings)
    assert life.error is None, f"{life.error}\n{life.said[-6000:]}"
    return life.value, life.said


def tier_of(engine):
    return engine.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]


def asked(engine, apart=False):
    """Returns tokens, each prompt's cached ones, and the tier's metrics.

    apart: runs a prompt when all chunks of the one before it are stored. Otherwise a CPU tier that
    is too small may drop any of them."""
    prefix = "vllm:ripieno_tier_"
    if apart:
        answers = []
        for prompt in PROMPTS:
            answers.append(engine.ask(prompt))
            engine.settle()
        said, cached = ([one for (one,) in each] for each in zip(*answers, strict=True))
    else:
        said, cached = engine.ask(*PROMPTS)
    # vLLM polls the tier in steps: until its transfers have ended, and once more.
    while tier_of(engine).jobs:
        engine.ask(PROMPTS[-1])
    engine.ask(PROMPTS[-1])
    metrics = [each for each in get_metrics_snapshot() if each.name.startswith(prefix)]
    return said, cached, {each.name.removeprefix(prefix): each.value for each in metrics}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma") / "model"
    gemmas.make(path)
    return path


@pytest.fixture(scope="module")
def gemma_said(gemma):
    (said, _), _ = live(tokens_of, model=gemma)
    assert len({tuple(tokens) for tokens in said}) == len(said), "tokens depend on prompts"
    return said


@pytest.fixture(scope="module")
def filled(model, said, tmp_path_factory):
    """A store that an engine filled."""
    store = {"path": str(tmp_path_factory.mktemp("filled"))}
    (found, _), _ = live(tokens_of, model=model, store=store)
    assert found == said
    return store


@pytest.fixture
def store(tmp_path):
    return {"path": str(tmp_path / "store")}


def bytes_of(answers):
    return {key: page for _, _, pages in answers for key, page in pages.items()}


def test_after_a_restart_hits_are_what_was_computed(model, computed, filled):
    answers, _ = live(alone, model=model, store=filled)
    assert [tokens for tokens, _, _ in answers] == [tokens for tokens, _, _ in computed]
    assert [cached for _, cached, _ in answers] == STORED
    assert bytes_of(answers) == bytes_of(computed)


def test_that_test_notices_a_load_that_does_nothing(model, said, filled, monkeypatch):
    monkeypatch.setattr(tiering.RipienoTier, "_load", lambda self, keys, _: (keys, len(keys)))
    answers, _ = live(alone, model=model, store=filled)
    assert [cached for _, cached, _ in answers] == STORED
    assert [tokens for tokens, _, _ in answers] != said


def test_an_engine_in_a_process_of_its_own(model, said, filled):
    settings = {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    assert live(tokens_of, model=model, store=filled, **settings)[0] == (said, STORED)


HYBRID = {"disable_hybrid_kv_cache_manager": False}


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_model_with_several_groups(gemma, gemma_said, store, blocks):
    """Two of its three KV cache groups have layers with a sliding window."""
    settings = {"model": gemma, "store": store, "blocks": blocks, **HYBRID}
    (found, _), said = live(tokens_of, **settings)
    assert found == gemma_said
    assert "kv cache group sizes (32, 32, 32)" in said
    stored = [whole(prompt, BLOCK * blocks) for prompt in PROMPTS]
    assert live(tokens_of, **settings)[0] == (gemma_said, stored)


def test_that_test_notices_keys_without_a_group(gemma, gemma_said, store, monkeypatch):
    monkeypatch.setattr(tiering, "_digest", lambda key: key[:-4])
    settings = {"model": gemma, "store": store, **HYBRID}
    assert live(tokens_of, **settings)[0][0] == gemma_said
    (found, cached), _ = live(tokens_of, **settings)
    assert (cached, found == gemma_said) == (STORED, False)


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_another_model_or_salt_finds_nothing(model, said, filled, tmp_path, salt):
    """Its blocks have the same size, and without a salt its tokens have the same hashes."""

    def body(engine):
        return engine.ask(PROMPTS[0], PROMPTS[3], salt=salt)

    if salt is None:
        model = shutil.copytree(model, tmp_path / "other")
    assert live(body, model=model, store=filled)[0] == ([said[0], said[3]], [0, 0])


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_an_engine_that_was_killed(model, said, store, seconds):
    def body(engine):
        engine.ask(PROMPTS[0])
        # vLLM passes chunks to the tier in later steps.
        engine.ask(PROMPTS[-1])
        while tier_of(engine).store.usage().stored < STORED[0] // BLOCK:
            time.sleep(0.01)
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        engine.ask(*PROMPTS[1:])
        threading.Event().wait()

    assert life_of(body, model=model, store=store).signal == signal.SIGKILL
    (found, cached), _ = live(tokens_of, model=model, store=store)
    assert found == said
    assert cached[0] == STORED[0], "the first prompt was stored before"


def test_damaged_chunks_are_computed_again(model, said, filled, store):
    shutil.copytree(filled["path"], store["path"])
    (medium,) = pathlib.Path(store["path"]).glob("*/device-0.img")
    with medium.open("r+b") as image:
        # A byte of every third chunk, wherever the chunks begin.
        for at in range(2 << 20, 12 << 20, 3 * CHUNK):
            image.seek(at)
            byte = image.read(1)
            image.seek(at)
            image.write(bytes([byte[0] ^ 0x40]))
    (found, cached, metrics), log = live(asked, model=model, store=store)
    assert found == said
    assert cached != STORED
    assert metrics["lost_chunks"] > 0
    assert log.count("not logged") == 1
    (found, cached, metrics), _ = live(asked, model=model, store=store)
    assert (found, cached) == (said, STORED), "they were stored again"
    assert (metrics["lost_chunks"], metrics["healthy"]) == (0, 1)


def test_more_than_there_is_room_for(model, said, store):
    """Neither the CPU's tier nor the disk has room for all prompts."""
    settings = {"model": model, "store": store | {"capacity": "10MiB"}, "cpu": 24 * CHUNK}
    for _ in range(2):
        (found, cached, metrics), _ = live(asked, True, **settings)
        assert found == said
        assert metrics["used_chunks"] <= metrics["capacity_chunks"] <= (10 << 20) // CHUNK
        assert metrics["evicted_chunks"] > 0
    assert 0 < sum(cached) < sum(STORED)


def test_a_store_that_died(model, said, filled):
    """The lost blocks are computed again, without further effects."""

    def body(engine):
        tier_of(engine).store.close()
        return asked(engine)

    (found, _, metrics), log = live(body, model=model, store=filled)
    assert found == said
    assert metrics["healthy"] == 0
    assert log.count("serving goes on without the tier") == 1


def test_after_a_reset_nothing_is_found(model, said, store):
    def body(engine):
        first, _ = engine.ask(PROMPTS[0])
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        return first, engine.ask(PROMPTS[0])

    assert live(body, model=model, store=store)[0] == (said[:1], (said[:1], [0]))


def test_two_workers_in_one_store(model, store):
    settings = {"model": model, "store": store, "tensor_parallel_size": 2}
    (first, _), _ = live(tokens_of, **settings)
    assert live(tokens_of, **settings)[0] == (first, STORED)


def test_events_have_the_tokens_of_each_medium(model, store):
    """A router's index learns which prefixes are on the GPU, in host memory and on disk."""

    def body(engine):
        events, publisher = [], engine.scheduler.kv_event_publisher
        publisher.publish = lambda batch: events.extend(batch.events)
        asked(engine)
        stored = [event for event in events if type(event).__name__ == "BlockStored"]
        return {(event.medium, block) for event in stored for block in blocks_of(event.token_ids)}

    def blocks_of(tokens):
        return [tuple(tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)]

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    told, _ = live(body, model=model, store=store, kv_events_config=config)
    blocks = blocks_of(PROMPTS[3][: STORED[3]])
    assert {(medium, block) for medium in ("GPU", "CPU", "STORAGE") for block in blocks} <= told


def test_hints_and_requests_that_store_nothing(model, said, store):
    """A prompt that is not to be stored is stored for the next request, which finds it in vLLM's
    own tiers; and what a hint pins is not evicted."""
    pin = KvHintsEnvelope("1", "m", [KvHintAction("a", "kv.pin", "1", {"ttl_s": 3600})])
    nothing = {"extra_args": {"kv_transfer_params": {"ripieno.store": False}}}

    def settled(engine, prompt, **more):
        """Returns a prompt's tokens and the number of chunks that are stored then."""
        (tokens,), _ = engine.ask(prompt, **more)
        engine.settle()
        return tokens, tier_of(engine).store.usage().stored

    def body(engine):
        seen = [settled(engine, PROMPTS[0], **more) for more in (nothing, {}, {"hints": pin})]
        seen.append(settled(engine, PROMPTS[3]))
        left = tier_of(engine).store
        return seen, left.evict(1 << 10), left.usage().stored

    (seen, evicted, left), log = live(body, model=model, store=store)
    assert [tokens for tokens, _ in seen] == [said[0]] * 3 + [said[3]]
    (_, first), (_, second), (_, third), (_, fourth) = seen
    assert (first, left) == (0, third)
    assert second >= STORED[0] // BLOCK
    assert evicted == fourth - third > 0
    assert "'outcome': 'deferred'" in log or "'outcome': 'accepted'" in log
