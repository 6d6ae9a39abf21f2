"""Successive engines on one store: killed, with several processes, with other settings."""

import os
import random
import shutil
import signal
import threading

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import tiny_model as models  # noqa: E402
from forked import life_of, live  # noqa: E402
from prompts import BLOCK, PIPELINE, PROMPTS, SHARED, STORED, tokens_of, whole  # noqa: E402

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
SOAK = int(os.environ.get("RIPIENO_SOAK", "1"))


@pytest.mark.parametrize(
    ("name", "count", "after"),
    [
        ("begin", 2, False),
        ("written", 2, False),
        # The data is written, but not committed.
        ("commit", 3, False),
        ("commit", 3, True),
        ("sync", 1, False),
        # There may be no second one: commits during a sync are made durable together.
        ("sync", 1, True),
    ],
)
def test_an_engine_that_is_killed(name, count, after, model, options, said):
    settings = {"model": model, "options": options}
    killer = faults.killed_at(name, count, after)
    assert life_of(tokens_of, catalog=killer, **settings).signal == signal.SIGKILL
    answers, cached = live(tokens_of, **settings)
    assert answers == said
    if (name, after) == ("sync", True):
        assert any(cached), "what was permanent is found"


@pytest.mark.parametrize("seed", range(2 * SOAK))
def test_an_engine_that_is_killed_at_random(seed, model, both, said):
    def ask(engine):
        delay = random.Random(seed).uniform(0, 2)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            engine.ask(*PROMPTS)
            engine.forget()

    killed = life_of(ask, model=model, options=both)
    assert killed.signal == signal.SIGKILL, killed.error
    assert live(tokens_of, model=model, options=both)[0] == said


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"distributed_executor_backend": "mp"},
        {"tensor_parallel_size": 2},
        PIPELINE,
    ],
    ids=["two", "three", "tp2", "pp2"],
)
def test_processes(args, model, options, said):
    """Scheduler and workers in processes of their own."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    settings = {"model": model, "environment": environment} | args
    assert live(tokens_of, options=options, **settings) == (said, SHARED)
    for load_async in (False, True):
        both = options | {"load_async": load_async}
        assert live(tokens_of, options=both, **settings) == (said, STORED)


def test_what_workers_store_at_the_end_is_found(model, options):
    """Workers are processes of their own, and end before the scheduler does."""
    settings = {"model": model, "options": options, "tensor_parallel_size": 2}

    class Late(faults.Late):
        store_seconds = 1

    def leave(engine):
        engine.ask(PROMPTS[0], max_tokens=1)
        assert engine.connector.backlog == whole(PROMPTS[0]) // BLOCK

    live(leave, plane=Late, **settings)
    assert live(lambda engine: engine.ask(PROMPTS[0])[1], **settings) == [whole(PROMPTS[0])]


def test_roles_are_kept(model, options, said):
    """A producer never loads, and a consumer never stores."""
    first, last = PROMPTS[0], PROMPTS[3]

    def twice(engine):
        answers = []
        for prompt in (first, first, last, last):
            (answer,), (cached,) = engine.ask(prompt)
            answers.append((answer, cached))
            engine.forget()
        return answers, engine.connector.catalog.stats().stored

    def once(engine):
        (answer,), (cached,) = engine.ask(first)
        engine.forget()
        return [answer, engine.ask(first)[1], cached]

    settings = {"model": model, "options": options}
    assert live(once, role="kv_producer", **settings) == [said[0], [0], 0]
    answers, stored = live(twice, role="kv_consumer", **settings)
    assert answers == [(said[0], whole(first))] * 2 + [(said[3], 0)] * 2
    assert stored == whole(first) // BLOCK, "as before"


def test_shutdown_while_blocks_are_stored_and_loaded(model, both, said):
    """Unfinished jobs are dropped; the remaining blocks are right."""

    def leave(engine, steps):
        for prompt in PROMPTS:
            engine.add(prompt)
        for _ in range(steps):
            engine.step()

    for steps in (1, 3):
        live(leave, steps, model=model, options=both, plane=faults.Late)
    assert live(tokens_of, model=model, options=both)[0] == said


@pytest.mark.parametrize(
    ("change", "is_alike"),
    [
        ({"model": "other"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"block_size": 64}, True),
        ({"tensor_parallel_size": 2}, True),
        (PIPELINE, True),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, True),
        ({"weights_id": "other"}, True),
        ({"hf_overrides": {"rope_parameters": ROPE}}, False),
    ],
)
def test_others_in_the_same_directory_find_nothing(
    change, is_alike, model, filled, options, said, tmp_path
):
    """Other weights, types, block sizes, shapes and numbers of workers. is_alike: the answers are
    the same."""
    shutil.copytree(filled[0]["path"], options["path"])
    if change.keys() - {"model", "prefix_caching_hash_algo", "weights_id", "hf_overrides"}:
        # This makes a second store, and both share one capacity.
        options["capacity"] = "64MiB"
    others = {"model": model, "options": options} | change
    if "model" in change:
        others["model"] = models.make(tmp_path / "other", seed=2)
    if "weights_id" in change:
        others["options"] = options | {"weights_id": others.pop("weights_id")}

    def twice(engine):
        first = tokens_of(engine)
        engine.forget()
        return first, tokens_of(engine)

    (answers, cached), second = live(twice, **others)
    assert cached == SHARED, "nothing is found"
    assert (answers == said) == is_alike
    found = [whole(prompt, change.get("block_size", BLOCK)) for prompt in PROMPTS]
    assert second == (answers, found), "its own is found"
    assert live(tokens_of, model=model, options=options) == (said, STORED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"path": "/x", "capacity": "lots"}}, "'lots' was given; expected a number"),
        ({"options": {"path": "/x", "capacity": None}}, "capacity: None was given; expected"),
        ({"options": {"path": "/x", "size": 1}}, "size: there is no such option"),
        ({"prefix_caching_hash_algo": "xxhash"}, "use sha256 or sha256_cbor"),
        # With it, others that read this store's hashes would find the same ones.
        (
            {"prefix_caching_hash_algo": "xxhash_cbor", "environment": {"PYTHONHASHSEED": "7"}},
            "use sha256 or sha256_cbor",
        ),
    ],
)
def test_what_can_not_be_is_refused_in_words(change, message, model, options):
    life = life_of(tokens_of, **{"model": model, "options": options} | change)
    assert message in life.error
