"""Engines that share the store of a server, which runs beside them."""

import contextlib
import hashlib
import os
import signal
import time
from functools import partial
from multiprocessing import Pipe

import pytest

pytest.importorskip("vllm")

import ripieno  # noqa: E402
from forked import SECONDS, life_of, live  # noqa: E402
from prompts import PROMPTS, STORED, alone, tokens, whole  # noqa: E402
from ripieno.vllm.place import ASK_SECONDS  # noqa: E402
from serving import Server  # noqa: E402
from vllm.config import KVEventsConfig  # noqa: E402
from waiting import until  # noqa: E402

LAST = tokens(200)
SHAPE = ripieno.Shape(layers=4, segments=1, object_bytes=32 * 8 * 2 * 32 * 4, block_tokens=32)
"""A block of the Llama: tokens, heads, K and V, elements and bytes of an object."""
HALF = ripieno.Shape(SHAPE.layers, 1, SHAPE.object_bytes // 2, SHAPE.block_tokens)
"""The same on each of two ranks."""


class Engine:
    """An engine in another process, which carries out functions of this module."""

    def __init__(self, pipe):
        self.pipe = pipe
        self.process = self.result()

    def begin(self, act):
        self.pipe.send(act)

    def result(self):
        assert self.pipe.poll(SECONDS), "the engine does not answer"
        return self.pipe.recv()

    def run(self, act):
        self.begin(act)
        return self.result()


def obey(engine, pipe):
    pipe.send(os.getpid())
    while (act := pipe.recv()) is not None:
        pipe.send(act(engine))


@contextlib.contextmanager
def running(server, model, role="kv_both", more_options=None, **more):
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        options = {"server": server.socket} | (more_options or {})
        settings = {"options": options, "policy": "recompute", "role": role} | more
        life = life_of(obey, theirs, model=model, **settings)
        is_good = life.error is None or life.signal == signal.SIGKILL
        if not is_good:
            print(life.said[-9000:], life.error, flush=True)
        os._exit(not is_good)
    try:
        yield Engine(ours)
    finally:
        ours.send(None)
        _, status = os.waitpid(child, 0)
    assert status == 0, "the engine failed; its output is above"


def churn(engine):
    """Stores and loads until the process is killed."""
    while True:
        engine.ask(tokens(200), *PROMPTS)
        engine.forget()


def asked(engine):
    """Returns tokens and cached tokens of a prompt."""
    (said,), (cached,) = engine.ask(PROMPTS[3])
    return said, cached


def settle(engine):
    engine.forget()


def said_and_cached(answers):
    return [said for said, _, _ in answers], [cached for _, cached, _ in answers]


def defers(engine):
    """Returns True if saves wait for their turn."""
    return engine.worker.saver.most is not None


@pytest.mark.parametrize("pacing", [False, True])
def test_engines_share_a_server(pacing, model, said, tmp_path):
    """One finds what the other has stored; one is killed; the server is killed, and comes back."""
    with Server(tmp_path, SHAPE, pacing) as server, running(server, model) as one:
        assert one.run(defers) == pacing
        computed = one.run(asked)
        one.run(settle)
        stored = one.run(alone)
        assert said_and_cached(stored)[0] == said
        pages = {key: page for *_, written in stored for key, page in written.items()}
        with running(server, model) as other:
            found = other.run(alone)
            assert said_and_cached(found) == (said, STORED)
            for (*_, loaded), count in zip(found, STORED, strict=True):
                same = [pages[key] == page for key, page in loaded.items() if key in pages]
                assert all(same) and len(same) >= count // SHAPE.block_tokens
            # One engine is killed while both load and store.
            other.begin(churn)
            for _ in range(3):
                assert said_and_cached(one.run(alone)) == (said, STORED)
            os.kill(other.process, signal.SIGKILL)
            assert said_and_cached(one.run(alone)) == (said, STORED)
        until(lambda: len(server.status()["sessions"]) <= 2, "the killed engine is still there")
        status = server.status()
        assert {each["pid"] for each in status["sessions"]} == {one.process}
        assert (status["files_writing"], status["files_referenced"]) == (0, 0), status
        assert status["refused_calls"] == 0

        # The server is killed while blocks are loaded.
        one.begin(alone)
        time.sleep(0.1)
        server.kill()
        assert said_and_cached(one.result())[0] == said
        assert one.run(asked) == (computed[0], 0)
        one.run(settle)
        server.start()
        until(lambda: said_and_cached(one.run(alone)) == (said, STORED), "it does not connect")
        assert one.process in {each["pid"] for each in server.status()["sessions"]}
    # The program itself is gone, too.
    assert server.process.returncode == -signal.SIGKILL


def listen(engine):
    engine.told, publisher = [], engine.scheduler.kv_event_publisher
    publisher.publish = lambda batch: engine.told.extend(batch.events)


def told(engine):
    """Returns the stored blocks that were announced since the last call, by their hashes with their
    tokens, and the hashes of those that were dropped."""
    engine.ask(LAST[:9], max_tokens=1)
    events = [event for event in engine.told if getattr(event, "medium", "") == "STORAGE"]
    engine.told.clear()
    stored, dropped = {}, set()
    for event in events:
        if type(event).__name__ == "BlockStored":
            before = event.parent_block_hash
            for at, hash in enumerate(event.block_hashes):
                stored[hash] = before, event.token_ids[at * 32 : (at + 1) * 32]
                before = hash
        else:
            dropped.update(event.block_hashes)
    return stored, dropped


def test_events_tell_what_is_stored_found_and_dropped(model, tmp_path):
    events = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
    with (
        Server(tmp_path, SHAPE) as server,
        running(server, model, **events) as one,
        running(server, model, **events) as other,
    ):
        for engine in (one, other):
            engine.run(listen)
            engine.run(told)
        one.run(alone)
        stored, _ = one.run(told)
        hits = {
            tuple(prompt[: at + 32])
            for prompt, hit in zip(PROMPTS, STORED, strict=True)
            for at in range(0, hit, 32)
        }
        other.run(alone)
        found, _ = other.run(told)
        # Each block that it found, with those before it, as the first engine tells them.
        assert len(found) == len(hits) and found.items() <= stored.items()
        assert {tuple(each) for _, each in found.values()} == {each[-32:] for each in hits}
        other.run(alone)
        assert other.run(told)[0] == found, "again, for an index that was reset"

        # A server that is away has not dropped them.
        server.kill()
        time.sleep(ASK_SECONDS)
        assert [engine.run(told)[1] for engine in (one, other)] == [set(), set()]
        server.start()
        time.sleep(ASK_SECONDS)
        assert [engine.run(told)[1] for engine in (one, other)] == [set(), set()]

        # Those that are gone are told, and so are those that are stored again.
        for each in server.status()["namespaces"]:
            server.control("clear", "--namespace", str(each["namespace"]))
        time.sleep(ASK_SECONDS)
        assert stored.keys() <= one.run(told)[1] and found.keys() <= other.run(told)[1]
        other.run(alone)
        assert found.items() <= other.run(told)[0].items()


def ask_with(engine, salts):
    """Returns the cached tokens of a prompt with each of these salts."""
    found = []
    for salt in salts:
        found += engine.ask(PROMPTS[0], salt=salt, max_tokens=1)[1]
        engine.forget()
    return found


def test_a_salt_has_a_quota_of_its_own(model, tmp_path):
    """The salts of the option, and no others, have namespaces, also after an engine's restart."""
    salts = ["alice-salt", "bob-salt", "another-salt", None]
    digests = [hashlib.sha256(salt.encode()).hexdigest() for salt in salts[:2]]
    tenants = {"more_options": {"tenants": digests}}
    hit, blocks = STORED[0], STORED[0] // SHAPE.block_tokens
    with Server(tmp_path, SHAPE) as server:

        def stored():
            of = server.status()["namespaces"]
            return {each["label"].partition(" ")[2]: each["files"] for each in of}

        alice, bob = (f"salt {digest[:8]}" for digest in digests)
        with running(server, model, **tenants) as one:
            # They are there before their first request.
            assert stored() == {"": 0, alice: 0, bob: 0}
            numbers = {each["label"]: each["namespace"] for each in server.status()["namespaces"]}
            (number,) = (at for label, at in numbers.items() if label.endswith(bob))
            room = str((blocks - 1) * SHAPE.layers * SHAPE.object_bytes)
            server.control("quota", "--namespace", str(number), "--bytes", room)
            assert one.run(partial(ask_with, salts=salts)) == [0] * 4
            full = {alice: blocks, bob: blocks - 1, "": 2 * blocks}
            assert stored() == full
            clipped = hit - SHAPE.block_tokens
            assert one.run(partial(ask_with, salts=salts)) == [hit, clipped, hit, hit]
            assert stored() == full
        with running(server, model, **tenants) as other:
            assert other.run(partial(ask_with, salts=salts)) == [hit, clipped, hit, hit]
        # An engine that does not know the tenants shares all but their blocks.
        with running(server, model) as stranger:
            assert stranger.run(partial(ask_with, salts=salts)) == [0, 0, hit, hit]
        assert not any(salt in str(server.status()) for salt in salts[:3])


def prefill(engine):
    """Computes each prompt's first token. Returns the cached tokens of each."""
    cached = []
    for prompt in PROMPTS:
        cached += engine.ask(prompt, max_tokens=1)[1]
        engine.forget()
    return cached


def test_one_engine_prefills_and_another_decodes(model, said, tmp_path):
    with (
        Server(tmp_path, SHAPE) as server,
        running(server, model, "kv_producer") as first,
        running(server, model, "kv_consumer") as second,
    ):
        assert first.run(prefill) == [0] * len(PROMPTS)
        stored = server.status()["files_stored"]
        assert said_and_cached(second.run(alone)) == (said, STORED)
        assert server.status()["files_stored"] == stored
        # It reads nothing.
        assert first.run(prefill) == [0] * len(PROMPTS)


def twice(engine):
    """Returns cached tokens the second time, and the number of files then. Ends with a prompt that
    is still being stored."""
    first, _ = engine.ask(*PROMPTS)
    engine.forget()
    again, cached = engine.ask(*PROMPTS)
    assert first == again
    engine.settle()
    stored = engine.connector.catalog.stats().stored
    engine.ask(LAST, max_tokens=1)
    return cached, stored


def test_ranks_share_a_server(model, tmp_path):
    with Server(tmp_path, HALF) as server:
        settings = {"model": model, "options": {"server": server.socket}}
        cached, stored = live(twice, tensor_parallel_size=2, **settings)
        assert cached == STORED
        status = server.settled()
        assert stored > 0
        assert status["files_stored"] == stored + 2 * (len(LAST) // SHAPE.block_tokens)
        assert (status["files_writing"], status["files_referenced"]) == (0, 0)
        assert status["refused_calls"] == 0


SHORT = [PROMPTS[0][:100], PROMPTS[3][:100]]
"""Prompts without a common prefix, for an emulated CPU."""


def ask_short(engine):
    """Returns tokens and cached tokens of each short prompt."""
    found = []
    for prompt in SHORT:
        found.append(engine.ask(prompt, max_tokens=4))
        engine.forget()
    return [said for (said,), _ in found], [cached for _, (cached,) in found]


@pytest.mark.parametrize("ranks", [2, 1])
def test_engines_share_what_a_server_keeps(model, tmp_path, ranks):
    """One finds what the ranks of the other have stored, also after the server was killed."""
    settings = {"tensor_parallel_size": ranks}
    stored = [whole(prompt) for prompt in SHORT]
    with (
        Server(tmp_path, HALF if ranks == 2 else SHAPE) as server,
        running(server, model, **settings) as one,
        running(server, model, **settings) as other,
    ):
        said, cached = one.run(ask_short)
        assert cached == [0, 0]
        assert other.run(ask_short) == (said, stored)
        status = server.status()
        # The scheduler and the ranks of each.
        assert len(status["sessions"]) == 2 * (1 + ranks)
        assert status["refused_calls"] == 0
        # Killed while both load. Blocks that were being loaded are computed, and found later.
        one.begin(ask_short)
        other.begin(ask_short)
        time.sleep(0.1)
        server.kill()
        assert [engine.result()[0] for engine in (one, other)] == [said, said]
        server.start()
        for engine in (one, other):

            def is_found(engine=engine):
                found = engine.run(ask_short)
                assert found[0] == said
                return found[1] == stored

            # An engine that met the dying server connects again after a second.
            until(is_found, "it does not connect")
        assert server.status()["refused_calls"] == 0


def test_an_engine_of_another_shape_is_told(model, tmp_path):
    shape = ripieno.Shape(SHAPE.layers, 1, SHAPE.object_bytes * 2, SHAPE.block_tokens)
    with Server(tmp_path, shape) as server:
        life = life_of(twice, model=model, options={"server": server.socket})
        assert "of another shape" in life.error and "objects of 65536 bytes" in life.error
        assert server.settled()["refused_calls"] == 0
    life = life_of(twice, model=model, options={"server": server.socket})
    assert "start the server" in life.error
