"""Two engines on the CPU, each with a store of its own: one takes KV blocks out of the other's
store, through vLLM's p2p tier and NIXL."""

import contextlib
import importlib.util
import os
import shutil
import signal
import time
from multiprocessing import Pipe

import pytest

pytest.importorskip("vllm")
if importlib.util.find_spec("nixl") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

import forked  # noqa: E402
import test_tiering  # noqa: E402
import zmq  # noqa: E402
from prompts import PROMPTS, STORED, tokens_of  # noqa: E402
from test_tiering import bytes_of  # noqa: E402
from vllm.distributed import nixl_utils  # noqa: E402
from vllm.v1.kv_offload.tiering.p2p.control.zmq import ZmqConnection  # noqa: E402
from waiting import kept_port  # noqa: E402

# vLLM imports NIXL, because it sets a variable before.
assert nixl_utils.NixlWrapper is not None, "NIXL cannot be imported"
from nixl import _bindings  # noqa: E402


def agent(name, config, make=_bindings.nixlAgent):
    """Makes an agent whose thread waits between its rounds, which takes a processor otherwise."""
    config.pthrDelay = 1000
    return make(name, config)


_bindings.nixlAgent = agent


def close(self, close=ZmqConnection.close):
    """vLLM 0.32 closes a connection with a message of farewell, and waits at its end, without a
    limit, until it is sent: for ever if the peer was the first to go."""
    if not self._closed:
        self._sockets.dealer.setsockopt(zmq.LINGER, 0)
    close(self)


ZmqConnection.close = close

ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


def life_of(body, *args, store, port=None, **settings):
    """Same as in test_tiering. store: the folder of the engine's store; port: where peers reach it,
    without which it has none."""
    tiers = [{"type": "p2p", "host": "127.0.0.1", "port": port}] if port else []
    store = {"path": str(store)}
    return test_tiering.life_of(
        body, *args, store=store, tiers=tiers, environment=ENVIRONMENT, **settings
    )


def live(body, *args, **settings):
    """Returns the body's result and the engine's output."""
    life = life_of(body, *args, **settings)
    assert life.error is None, f"{life.error}\n{life.said[-6000:]}"
    return life.value, life.said


@contextlib.contextmanager
def serving(model, store):
    """An engine that answers its peers. Yields its port and its process."""
    port = kept_port()
    told, tell = Pipe(duplex=False)
    stopped, stop = Pipe(duplex=False)

    def serve(engine):
        tell.send(os.getpid())
        while not stopped.poll(0):
            engine.step()
            time.sleep(0.0005)

    child = os.fork()
    if child == 0:
        life = life_of(serve, model=model, store=store, port=port)
        print(life.said, life.error, flush=True)
        os._exit(life.error is not None and life.signal != signal.SIGKILL)
    try:
        assert told.poll(forked.SECONDS), "the peer does not start"
        process = told.recv()
        yield port, process
    finally:
        stop.send(None)
        _, status = os.waitpid(child, 0)
    assert status == 0, "the peer failed; its output is above"


def asked(engine, peer, prepare=None):
    """Returns tokens, cached tokens and KV bytes of each prompt, which the peer may have. prepare:
    called first."""
    if prepare:
        prepare()
    answers = []
    for number, prompt in enumerate(PROMPTS):
        source = {
            "kv_request_id": f"request{number}",
            "remote_host": "127.0.0.1",
            "remote_port": peer,
        }
        extra = {"kv_transfer_params": {"remote_kv_source": source}}
        (said,), (cached,) = engine.ask(prompt, extra_args=extra)
        answers.append((said, cached, engine.pages()))
        assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    return answers


@pytest.fixture(scope="module")
def filled(model, said, tmp_path_factory):
    """A store that an engine filled, which then ended."""
    store = tmp_path_factory.mktemp("filled")
    (found, _), _ = live(tokens_of, model=model, store=store)
    assert found == said
    return store


@pytest.fixture
def peer_store(filled, tmp_path):
    return shutil.copytree(filled, tmp_path / "peer")


def test_blocks_out_of_the_store_of_a_peer(model, computed, said, peer_store, tmp_path):
    """All blocks of the prompts, in each layer, are what was computed."""
    with serving(model, peer_store) as (peer, _):
        answers, _ = live(asked, peer, model=model, store=tmp_path / "own", port=kept_port())
    assert [tokens for tokens, _, _ in answers] == said
    assert [cached for _, cached, _ in answers] == STORED
    assert bytes_of(answers) == bytes_of(computed)


def test_a_peer_that_is_not_there(model, said, tmp_path, monkeypatch):
    """A directory may name an engine that has ended: the prompts are computed."""
    monkeypatch.setenv("VLLM_P2P_HANDSHAKE_TIMEOUT_S", "2")
    own, gone = tmp_path / "own", kept_port()
    answers, _ = live(asked, gone, model=model, store=own, port=kept_port())
    assert [tokens for tokens, _, _ in answers] == said
    assert [cached for _, cached, _ in answers] == [0, 320, 320, 0, 0], "by the own tiers"


def test_a_peer_killed_in_the_middle(model, said, peer_store, tmp_path, monkeypatch):
    """It is killed when its blocks were asked for: the prompts are computed."""
    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

    monkeypatch.setenv("VLLM_P2P_HANDSHAKE_TIMEOUT_S", "2")
    loads = P2PSecondaryTierManager.submit_load
    with serving(model, peer_store) as (peer, process):

        def submit_load(self, job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            loads(self, job)

        def prepare():
            P2PSecondaryTierManager.submit_load = submit_load

        own = tmp_path / "own"
        answers, log = live(asked, peer, prepare, model=model, store=own, port=kept_port())
    assert [tokens for tokens, _, _ in answers] == said
    assert answers[0][1] == 0
    assert f"peer 127.0.0.1:{peer} down" in log


def test_another_model_is_refused_at_the_handshake(model, said, peer_store, tmp_path, monkeypatch):
    """Its blocks have the same size, and its tokens have the same hashes."""
    monkeypatch.setenv("VLLM_P2P_HANDSHAKE_TIMEOUT_S", "2")
    other = shutil.copytree(model, tmp_path / "other")
    with serving(model, peer_store) as (peer, _):
        answers, _ = live(asked, peer, model=other, store=tmp_path / "own", port=kept_port())
    assert [tokens for tokens, _, _ in answers] == said
    assert answers[0][1] == 0
