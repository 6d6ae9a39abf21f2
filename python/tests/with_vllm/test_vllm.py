"""A real vLLM, on the CPU, with the connector."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

pytest.importorskip("vllm")
import engine  # noqa: E402
import model  # noqa: E402

# Whole blocks of each prompt, but for its last token.
STORED = [(len(prompt) - 1) // engine.BLOCK * engine.BLOCK for prompt in engine.prompts()]
# What vLLM's own prefix cache finds: the first prompt's begin.
SHARED = [0, 320, 320, 0]


def start(place, *, processes=False, **settings):
    program = pathlib.Path(__file__).parent / "engine.py"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0"}
    if settings.get("tp", 1) > 1:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    command = [sys.executable, "-P", program, place / "model", json.dumps(settings)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def live(place, **settings):
    """Tokens of each prompt, how many were cached, and what the engine logged."""
    ended = start(place, **settings)
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads([line for line in ended.stdout.splitlines() if line[:2] == '{"'][-1])
    return result["tokens"], result["cached"], ended.stdout + ended.stderr


def options(store, **more):
    return {"path": str(store), "capacity": "128MiB", **more}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With the model, and what it says without a connector."""
    place = tmp_path_factory.mktemp("vllm")
    model.make(place / "model")
    tokens, cached, _ = live(place)
    assert cached == SHARED
    assert len({tuple(each) for each in tokens}) == 4, "tokens depend on the prompt"
    (place / "expected").write_text(json.dumps(tokens))
    return place


@pytest.fixture(scope="module")
def expected(place):
    return json.loads((place / "expected").read_text())


@pytest.fixture(scope="module")
def filled(place, expected):
    """A store that an engine filled."""
    store = place / "filled"
    tokens, cached, _ = live(place, options=options(store))
    assert (tokens, cached) == (expected, SHARED)
    return store


@pytest.mark.parametrize(("processes", "load_async"), [(False, False), (True, True)])
def test_after_a_restart_prompts_are_found(place, expected, filled, processes, load_async):
    settings = {"options": options(filled, load_async=load_async), "processes": processes}
    tokens, cached, _ = live(place, **settings)
    assert (tokens, cached) == (expected, STORED)


@pytest.mark.parametrize("how", ["nothing", "swapped"])
def test_these_tests_notice_a_wrong_cache(place, expected, filled, how):
    tokens, cached, _ = live(place, options=options(filled), sabotage=how)
    assert cached == STORED
    assert tokens != expected


def test_an_engine_that_was_killed(place, expected):
    store = place / "killed"
    assert start(place, options=options(store), kill=True).returncode == -signal.SIGKILL
    tokens, cached, _ = live(place, options=options(store))
    assert tokens == expected
    assert cached[0] == STORED[0]


def test_damaged_blocks_are_computed_again(place, expected):
    store = place / "damaged"
    live(place, options=options(store))
    (medium,) = store.glob("*/rank-0/device-0.img")
    with medium.open("r+b") as image:
        for page in range(3):
            image.seek((1 << 20) + page * (1 << 16) + 1000)
            byte = image.read(1)
            image.seek(-1, os.SEEK_CUR)
            image.write(bytes([byte[0] ^ 0x40]))
    tokens, _, said = live(place, options=options(store), policy="recompute")
    assert tokens == expected
    assert "blocks did not arrive" in said
    tokens, cached, said = live(place, options=options(store))
    assert (tokens, cached) == (expected, STORED), "they were stored again"
    assert "blocks did not arrive" not in said


def test_two_workers_with_a_half_each(place, expected):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM's workers need a core each")
    store = place / "two"
    settings = {"options": options(store), "tp": 2, "processes": True}
    first, _, _ = live(place, **settings)
    tokens, cached, _ = live(place, **settings)
    assert (tokens, cached) == (first, STORED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"path": "/x", "capacity": "lots"}}, "give bytes, or a size such as"),
        ({"options": {"path": "/x"}}, "capacity is missing"),
        ({"options": {"path": "/x", "capacity": 1, "size": 1}}, "size is unknown"),
        ({"options": {"path": "/x", "capacity": 1}, "hash": "xxhash"}, "set PYTHONHASHSEED"),
    ],
)
def test_what_can_not_be_is_refused_in_words(place, settings, message):
    ended = start(place, **settings)
    assert ended.returncode != 0
    assert message in ended.stdout + ended.stderr
