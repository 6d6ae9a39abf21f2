"""A real vLLM, on the CPU, with tiered offloading and the tier at its end."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import uuid

import pytest

pytest.importorskip("vllm")
import gemma  # noqa: E402
import model  # noqa: E402
import tiering_engine as engine  # noqa: E402

HERE = pathlib.Path(__file__).parent
# Whole blocks of each prompt.
STORED = [len(prompt) // engine.BLOCK * engine.BLOCK for prompt in engine.prompts()]
# What vLLM's own prefix cache finds, where its blocks have one group.
SHARED = [0, 320, 320, 0]
CHUNK = 262144
"""Bytes of a block of the Llama."""


def start(place, *, model="model", processes=False, **settings):
    settings = {"name": uuid.uuid4().hex, "cpu": 128 * CHUNK, **settings}
    # The engine's other processes import from here, too.
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
    }
    if settings.get("tp", 1) > 1:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    program = HERE / "tiering_engine.py"
    command = [sys.executable, "-P", program, place / model, json.dumps(settings)]
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300
        )
    finally:
        # What vLLM leaves behind when it is killed.
        pathlib.Path(f"/dev/shm/vllm_offload_{settings['name']}.mmap").unlink(missing_ok=True)


def live(place, **settings):
    """Tokens of each prompt, how many were cached, the tier's metrics, and what was logged."""
    ended = start(place, **settings)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    result = json.loads([line for line in ended.stdout.splitlines() if line[:2] == '{"'][-1])
    said = ended.stdout + ended.stderr
    return result["tokens"], result["cached"], result["metrics"], said


def tier(store, **more):
    return {"path": str(store), "capacity": "128MiB", **more}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With two models, and what they say without a connector."""
    place = tmp_path_factory.mktemp("tiering")
    expected = {}
    for name, maker in [("model", model), ("gemma", gemma)]:
        maker.make(place / name)
        expected[name], *_ = live(place, model=name)
        assert len({tuple(tokens) for tokens in expected[name]}) == 4
    (place / "expected").write_text(json.dumps(expected))
    return place


@pytest.fixture(scope="module")
def expected(place):
    return json.loads((place / "expected").read_text())


@pytest.fixture(scope="module")
def filled(place, expected):
    """By model: a store that an engine filled."""
    stores = {}
    for name in expected:
        stores[name] = place / f"filled-{name}"
        tokens, *_ = live(place, model=name, tier=tier(stores[name]))
        assert tokens == expected[name]
    return stores


@pytest.mark.parametrize(("name", "processes"), [("model", True), ("gemma", False)])
def test_after_a_restart_prompts_are_found(place, expected, filled, name, processes):
    """Of the Gemma: with several groups of KV cache, as vLLM has them for a model like it."""
    settings = {"model": name, "processes": processes, "tier": tier(filled[name])}
    tokens, cached, metrics, said = live(place, **settings)
    assert (tokens, cached) == (expected[name], STORED)
    assert (metrics["healthy"], metrics["lost_chunks"]) == (1, 0)
    assert sum(STORED) // engine.BLOCK > metrics["used_chunks"] > STORED[-1] // engine.BLOCK
    assert ("kv cache group sizes (32, 32, 32)" in said) == (name == "gemma")


def test_these_tests_notice_a_load_that_does_nothing(place, expected, filled):
    tokens, cached, *_ = live(place, model="gemma", tier=tier(filled["gemma"]), sabotage=True)
    assert cached == STORED
    assert tokens != expected["gemma"]


def test_another_model_finds_nothing(place, filled):
    """Its blocks are as large, and its tokens have the same hashes."""
    shutil.copytree(place / "model", place / "other")
    _, cached, _, said = live(place, model="other", tier=tier(filled["model"]))
    assert cached == SHARED
    assert "0 chunks are stored" in said


def test_another_salt_finds_nothing(place, expected, filled):
    tokens, cached, *_ = live(place, tier=tier(filled["model"]), salt="tenant")
    assert (tokens, cached) == (expected["model"], SHARED)


def test_an_engine_that_was_killed_twice(place, expected):
    store = place / "killed"
    for after_ms in (700, 150):
        ended = start(place, tier=tier(store), kill=after_ms)
        assert ended.returncode == -signal.SIGKILL, (ended.stdout + ended.stderr)[-4000:]
    tokens, cached, *_ = live(place, tier=tier(store))
    assert tokens == expected["model"]
    assert cached[0] == STORED[0], "the first prompt was stored before"


def test_damaged_chunks_are_computed_again(place, expected, filled):
    store = place / "damaged"
    shutil.copytree(filled["model"], store)
    (medium,) = store.glob("*/device-0.img")
    with medium.open("r+b") as image:
        # Wherever the chunks begin: a byte of every third one.
        for at in range(2 << 20, 12 << 20, 3 * CHUNK):
            image.seek(at)
            byte = image.read(1)
            image.seek(-1, os.SEEK_CUR)
            image.write(bytes([byte[0] ^ 0x40]))
    tokens, cached, metrics, said = live(place, tier=tier(store))
    assert tokens == expected["model"]
    assert cached < STORED
    assert metrics["lost_chunks"] > 0
    assert said.count("not logged") == 1
    tokens, cached, metrics, _ = live(place, tier=tier(store))
    assert (tokens, cached) == (expected["model"], STORED), "they were stored again"
    assert metrics["lost_chunks"] == 0


def test_more_than_there_is_room_for(place, expected):
    """Neither the CPU's tier nor the disk has room for all prompts."""
    store = tier(place / "small", capacity="10MiB")
    tokens, _, metrics, _ = live(place, tier=store, cpu=24 * CHUNK)
    assert tokens == expected["model"]
    assert metrics["evicted_chunks"] > 0
    assert metrics["used_chunks"] <= metrics["capacity_chunks"] <= (10 << 20) // CHUNK
    tokens, cached, *_ = live(place, tier=store, cpu=24 * CHUNK)
    assert tokens == expected["model"]
    assert 0 < sum(cached) < sum(STORED)


def test_a_store_that_died(place, expected, filled):
    """Whatever it held is computed, and nothing else happens."""
    tokens, cached, metrics, said = live(place, tier=tier(filled["model"]), break_tier=True)
    # The third finds what the second has computed.
    assert (tokens, cached) == (expected["model"], [STORED[0], 0, 320, 0])
    assert said.count("serving goes on without the tier") == 1
    assert metrics["healthy"] == 0


def test_two_workers_in_one_store(place):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM's workers need a core each")
    settings = {"tier": tier(place / "two"), "tp": 2, "processes": True}
    first, *_ = live(place, **settings)
    tokens, cached, *_ = live(place, **settings)
    assert (tokens, cached) == (first, STORED)
