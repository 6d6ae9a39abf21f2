"""Two engines on the CPU behind the router, each with a store of its own and a member in etcd."""

import asyncio
import contextlib
import ctypes
import functools
import importlib.util
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
import uuid
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
if importlib.util.find_spec("nixl") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

import etcd_server  # noqa: E402
import forked  # noqa: E402, F401
import host_tiering  # noqa: E402, F401
import msgspec  # noqa: E402
import vllm.entrypoints.launchers.api_server.entry as server  # noqa: E402
import vllm.v1.engine.async_llm  # noqa: E402, F401
from prompts import BLOCK, PROMPTS, STORED  # noqa: E402
from serving import Server  # noqa: E402
from test_served import SHAPE  # noqa: E402
from test_two_engines import CHUNK, ENVIRONMENT  # noqa: E402
from vllm.distributed.kv_events import (  # noqa: E402
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.engine.core import EngineCoreProc  # noqa: E402
from waiting import WATCHDOG, kept_port  # noqa: E402

from ripieno.router import __main__ as router_program  # noqa: E402
from ripieno.router.choice import Costs, Engine, Member  # noqa: E402
from ripieno.router import events as router_events  # noqa: E402

soak = pytest.mark.skipif("RIPIENO_SOAK" not in os.environ, reason="slow: set RIPIENO_SOAK=1")
LOOPBACK = "127.0.0.1"
CLONE_NEWNET = 0x40000000
DYNAMO = os.environ.get("RIPIENO_DYNAMO")
"""Python of an environment with ai-dynamo-runtime."""
NEVER, FAST = 0.01, 1e5
"""Tokens a second of an engine that is not chosen, and of one that is."""


def program(body, log, before=lambda: None):
    """Runs body() in a process of its own, with those that it starts in its group. before(): the
    first that it does."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        logging.getLogger().handlers.clear()
        failed = 1
        try:
            before()
            body()
            failed = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    return child


def leave_network():
    """Moves this process to a network of its own, in which there is nothing."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    ip("link set lo up")


def ip(command, inside=()):
    subprocess.run([*inside, "ip", *command.split()], check=True, timeout=WATCHDOG)


def end(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def fetch(url, body=None):
    """Returns an answer and its headers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WATCHDOG) as answer:
        text = answer.read()
        return json.loads(text) if text else None, answer.headers


def until(is_so, why):
    late = time.monotonic() + WATCHDOG
    while True:
        with contextlib.suppress(OSError):
            if is_so():
                return
        assert time.monotonic() < late, why
        time.sleep(0.05)


class Machine:
    """vLLM's server and its member; in a network namespace, unless its host is this one. It has a
    store and a `p2p` tier, or is a client of the server of a store at the socket `served`."""

    def __init__(self, model, directory, name, host, etcd, served):
        self.directory, self.name, self.etcd, self.model = directory, name, etcd, model
        self.served = served
        self.port, self.events, self.replay, self.p2p = (kept_port() for _ in range(4))
        self.host, self.url = host, f"http://{host}:{self.port}"
        self.id = uuid.uuid4().hex
        log = directory / f"{name}.log"
        self.member, self.inside = None, []
        if host == LOOPBACK:
            self.child = program(self.serve, log)
        else:
            self.child = self.serve_apart(log)

    def serve_apart(self, log):
        (left, leave), (joined, join) = Pipe(duplex=False), Pipe(duplex=False)

        def before():
            leave_network()
            leave.send(None)
            assert joined.poll(WATCHDOG)

        child = program(self.serve, log, before)
        try:
            assert left.poll(WATCHDOG), "no network namespace"
            self.inside = ["nsenter", "--net", "--target", str(child)]
            ip(f"link add name {self.name} type veth peer name eth0 netns {child}")
            ip(f"link set dev {self.name} master lan up")
            ip(f"address add {self.host}/24 dev eth0", self.inside)
            ip("link set eth0 up", self.inside)
        except BaseException:
            end(child)
            raise
        join.send(None)
        return child

    def transfer(self):
        """Returns the configuration of its connector."""
        if self.served:
            return {
                "kv_connector": "RipienoConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": self.id,
                "kv_connector_extra_config": {"server": self.served},
            }
        tiers = [
            {
                "type": "RipienoTier",
                "module_path": "ripieno.tiering",
                "capacity": "64MiB",
                "path": str(self.directory / self.name),
            },
            {"type": "p2p", "host": self.host, "port": self.p2p},
        ]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self.id,
            "kv_connector_extra_config": {
                "spec_name": "HostTieringSpec",
                "spec_module_path": "host_tiering",
                "cpu_bytes_to_use": 128 * CHUNK,
                "blocks_per_chunk": 1,
                "secondary_tiers": tiers,
                "self_describing_kv_events": True,
            },
        }

    def serve(self):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        os.environ |= ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
        if self.host != LOOPBACK:
            os.environ["UCX_NET_DEVICES"] = "eth0"
        made, step = AsyncEngineArgs.create_engine_config, EngineCoreProc._process_engine_step

        def create_engine_config(*args, **kwargs):
            config = made(*args, **kwargs)
            # As in forked.Engine: the engine's core imports nothing again.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            return config

        def process_engine_step(core):
            # With a p2p tier an idle engine polls, and two of them take both cores of CI's machine.
            executed = step(core)
            if not executed:
                time.sleep(0.002)
            return executed

        AsyncEngineArgs.create_engine_config = create_engine_config
        EngineCoreProc._process_engine_step = process_engine_step
        flags = f"""vllm --model {self.model} --served-model-name model --host {self.host}
            --port {self.port} --dtype float32 --max-model-len 1024 --block-size {BLOCK}
            --num-gpu-blocks-override 96 --enforce-eager --max-num-batched-tokens 256
            --distributed-executor-backend uni --prefix-caching-hash-algo sha256
            --enable-prompt-tokens-details"""
        sys.argv = [*flags.split(), "--kv-transfer-config", json.dumps(self.transfer())]
        sys.argv += ["--kv-events-config", json.dumps(events)]
        server.main()

    def announce(self, speed, *more):
        """Starts its member, with its engine's tokens a second; the one before ends."""
        self.silence()
        peer = "" if self.served else f"--p2p {self.host}:{self.p2p} --link-gbps 100"
        command = f"""-m ripieno.router.member --etcd {self.etcd} --engine {self.url}
            --events tcp://{self.host}:{self.events} --replay tcp://{self.host}:{self.replay}
            --tokens-per-second {speed} --token-bytes {CHUNK / BLOCK} {peer}"""
        with open(self.directory / f"{self.name}.member.log", "a") as log:
            command = [*self.inside, sys.executable, *command.split(), *more]
            self.member = subprocess.Popen(command, stderr=log)

    def silence(self):
        if self.member:
            self.member.terminate()
            assert self.member.wait(WATCHDOG) == 0
            self.member = None

    def close(self):
        if self.member:
            self.member.kill()
            self.member.wait()
        end(self.child)
        pathlib.Path(f"/dev/shm/vllm_offload_{self.id}.mmap").unlink(missing_ok=True)


class Cluster:
    """hosts: those of the engines. served: the socket of their store's server, if there is one."""

    def __init__(self, model, directory, etcd, hosts, served):
        port = kept_port()
        self.url = f"http://127.0.0.1:{port}"
        self.directory, self.machines = directory, []
        asked = ["--etcd", etcd, "--listen", f"127.0.0.1:{port}"]
        route = functools.partial(router_program.main, asked)
        self.router = program(route, directory / "router.log")
        try:
            for name, host in zip("ab", hosts, strict=True):
                self.machines.append(Machine(model, directory, name, host, etcd, served))
            for machine in self.machines:
                until(lambda url=machine.url: fetch(f"{url}/health"), "an engine does not start")
        except BaseException:
            self.close()
            raise

    def members(self):
        """Returns the number of blocks by medium, by tokens a second and URL of the engine."""
        found, _ = fetch(f"{self.url}/members")
        return {
            (each["engine"], each["costs"]["tokens_per_second"]): each["blocks"] for each in found
        }

    def announce(self, speeds, *more):
        """Announces both engines with these tokens a second, and more flags."""
        for machine, speed in zip(self.machines, speeds, strict=True):
            machine.announce(speed, *more)
        pairs = zip(self.machines, speeds, strict=True)
        expected = {(machine.url, speed) for machine, speed in pairs}
        until(lambda: self.members().keys() == expected, "the members are not there")

    def knows(self, machine, blocks, tiers=("CPU", "STORAGE")):
        """Waits until the router knows so many blocks in each of these tiers of an engine."""

        def is_known():
            found = [media for (url, _), media in self.members().items() if url == machine.url]
            return found and all(found[0].get(it, 0) >= blocks for it in tiers)

        until(is_known, f"the blocks of {machine.name} are not known: {self.members()}")

    def close(self):
        for machine in self.machines:
            machine.close()
        end(self.router)
        for log in sorted(self.directory.glob("*.log")):
            print(f"{log.name}:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def running(model, directory, host=LOOPBACK, hosts=(LOOPBACK, LOOPBACK), served=None):
    """A cluster. host: that of etcd."""
    with etcd_server.Server(directory / "etcd", host) as etcd:
        cluster = Cluster(model, directory, etcd.address, hosts, served)
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture
def cluster(model, tmp_path):
    with running(model, tmp_path) as cluster:
        yield cluster


def body_of(prompt, count=24, **more):
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more


def ask(url, prompt, **more):
    """Returns tokens, how many of the prompt were cached, and engine and source by the router."""
    answer, headers = fetch(f"{url}/v1/completions", body_of(prompt, **more))
    details = answer["usage"]["prompt_tokens_details"] or {}
    return SimpleNamespace(
        tokens=answer["choices"][0]["token_ids"],
        cached=details.get("cached_tokens", 0),
        engine=headers["X-Ripieno-Engine"],
        source=headers["X-Ripieno-Source"],
    )


def serves(cluster):
    """Sends requests: where their prefix is, where it is fetched, and when an engine is killed."""
    a, b = cluster.machines
    cluster.announce((FAST, FAST))
    computed = [ask(a.url, PROMPTS[0]), ask(a.url, PROMPTS[3])]
    assert [found.cached for found in computed] == [0, 0]
    cluster.knows(a, (STORED[0] + STORED[3]) // BLOCK)
    # Each in turn, if nothing was known.
    for prompt, shared in [(PROMPTS[0], STORED[0]), (PROMPTS[1], 320)] * 2:
        found = ask(cluster.url, prompt)
        assert (found.engine, found.source) == (a.url, None)
        assert found.cached >= shared
    # A is as if it were busy: B takes the blocks from it, and its answer is that of computing.
    cluster.announce((NEVER, FAST))
    cluster.knows(a, (STORED[0] + STORED[3]) // BLOCK)
    found = ask(cluster.url, PROMPTS[0])
    assert (found.engine, found.source) == (b.url, a.url)
    assert (found.tokens, found.cached) == (computed[0].tokens, STORED[0])
    # B is killed: A serves, and B's lease ends.
    end(b.child)
    answers = []

    def is_answered():
        try:
            answers.append(ask(cluster.url, PROMPTS[3]))
        except urllib.error.HTTPError as error:
            # One that B's socket took before its last process had ended is not sent to A.
            assert error.code == 502
        return answers

    until(is_answered, "A does not serve")
    assert (answers[0].engine, answers[0].tokens) == (a.url, computed[1].tokens)
    until(lambda: cluster.members().keys() == {(a.url, NEVER)}, "the lease of B does not end")


def test_requests_go_where_their_prefix_is_or_fetch_it(cluster):
    serves(cluster)


def test_engines_of_one_server_are_weighed_with_its_blocks(model, tmp_path):
    """The slower engine is chosen as long as only it is known to have a prefix; the other one as
    soon as both are known to have the same store."""
    with (
        Server(tmp_path, SHAPE) as store,
        running(model, tmp_path, served=store.socket) as cluster,
    ):
        a, b = cluster.machines
        cluster.announce((100, 1000))
        first, second = ask(a.url, PROMPTS[0]), ask(a.url, PROMPTS[3])
        known = (STORED[0] + STORED[3]) // BLOCK
        cluster.knows(a, known, ["STORAGE"])
        assert ask(cluster.url, PROMPTS[0]).engine == a.url
        cluster.announce((100, 1000), "--store", "ours")
        cluster.knows(a, known, ["STORAGE"])
        found = ask(cluster.url, PROMPTS[0])
        assert (found.engine, found.source, found.cached) == (b.url, None, STORED[0])
        assert found.tokens == first.tokens
        # The directory is stale then: the prompt is computed.
        store.kill()
        found = ask(cluster.url, PROMPTS[3])
        assert (found.engine, found.cached, found.tokens) == (b.url, 0, second.tokens)


@soak
def test_two_machines_are_two_network_namespaces(model, tmp_path):
    """The same, with a bridge in a third one, from where the client asks."""
    if not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("ip or nsenter is not installed")
    etcd_server.program()

    def serve():
        ip("link add lan type bridge")
        ip("address add 198.18.0.254/24 dev lan")
        ip("link set lan up")
        with running(model, tmp_path, "198.18.0.254", ["198.18.0.1", "198.18.0.2"]) as cluster:
            serves(cluster)

    for body, log in [(lambda: None, "empty"), (serve, "serve")]:
        child = program(body, tmp_path / f"{log}.log", leave_network)
        try:
            _, status = os.waitpid(child, 0)
        finally:
            end(child)
        said = (tmp_path / f"{log}.log").read_text(errors="replace")
        if status and body is not serve:
            pytest.skip(f"no network namespaces here: {said.splitlines()[-1]}")
        assert status == 0, said[-9000:]


def stored(number, tokens, parent=None):
    """An event that an engine's block with a hash `number` is in host memory."""
    return BlockStored([number], parent, tokens, len(tokens), None, "CPU", None, group_idx=0)


def test_missed_events_are_asked_for_again(monkeypatch, caplog):
    """vLLM's own publisher, which keeps three batches, and a reader that comes late and misses
    some."""
    monkeypatch.setattr(router_events, "SECONDS", WATCHDOG)
    endpoint, again = (f"tcp://127.0.0.1:{kept_port()}" for _ in range(2))
    bound = endpoint.replace("127.0.0.1", "*")
    publisher = ZmqEventPublisher(0, bound, again, buffer_steps=3)
    costs = Costs(tokens_per_second=1.0, token_bytes=1.0, read={"CPU": 1.0})
    engine = Engine(Member("http://x", endpoint, again, None, costs, block_tokens=2))
    prompt = list(range(9))

    def publish(*events):
        publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    async def known(count):
        late = time.monotonic() + WATCHDOG
        while (found := len(engine.blocks.find(prompt))) != count:
            assert time.monotonic() < late, found
            await asyncio.sleep(0.02)

    async def connected():
        """Waits until the reader gets what is published: here something that it says is wrong."""
        late = time.monotonic() + WATCHDOG
        while "an event that is not valid" not in caplog.text:
            assert time.monotonic() < late, "it does not connect"
            publisher._pub.send_multipart((b"", (99).to_bytes(8, "big"), b"no event"))
            await asyncio.sleep(0.02)

    async def run():
        publish(stored(1, prompt[0:2]))
        publish(stored(2, prompt[2:4], 1))
        reader = router_events.Reader(engine)
        task = asyncio.create_task(reader.follow())
        # Those before the reader.
        await known(2)
        await connected()
        publish(stored(3, prompt[4:6], 2))
        await known(3)
        # A batch is missed: as if the one before had not come.
        reader.feed.next, reader.feed.newest = reader.feed.next - 1, 0.0
        publish(stored(4, prompt[6:8], 3))
        await known(4)
        # More are missed than are kept: only the kept ones are known.
        reader.feed.next, reader.feed.newest = reader.feed.next - 4, 0.0
        publish(stored(5, [9, 9], 4))
        late = time.monotonic() + WATCHDOG
        while engine.blocks.keys.keys() != {3, 4, 5}:
            assert time.monotonic() < late, engine.blocks.keys
            await asyncio.sleep(0.02)
        publish(AllBlocksCleared())
        await known(0)
        # Not valid, and then valid again.
        publisher._pub.send_multipart((b"", (99).to_bytes(8, "big"), b"no event"))
        empty = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=[]))
        for size in (9, 10):
            publisher._pub.send_multipart((b"", b"\xff" * size, empty))
        publish(stored(1, prompt[0:2]))
        await known(1)
        assert not task.done()
        task.cancel()

    try:
        asyncio.run(run())
    finally:
        publisher.shutdown()


@pytest.mark.skipif(DYNAMO is None, reason="RIPIENO_DYNAMO names no Python with Dynamo")
def test_dynamo_reads_the_events_of_each_tier(cluster):
    """Its indexer, which subscribes to an engine."""
    machine, port = cluster.machines[0], kept_port()
    code = "from dynamo._core import run_kv_indexer; import sys; run_kv_indexer(sys.argv[1:])"
    flags = f"--port {port} --block-size {BLOCK} --model-name model"
    flags += f" --workers 1=tcp://127.0.0.1:{machine.events}"
    with open(cluster.directory / "dynamo.log", "w") as log:
        indexer = subprocess.Popen([DYNAMO, "-c", code, *flags.split()], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: fetch(f"{url}/workers")[0][0]["status"] == "active", "it does not start")
        ask(machine.url, PROMPTS[0])

        def found():
            query = {"token_ids": PROMPTS[0], "model_name": "model"}
            tiers = fetch(f"{url}/query", query)[0]["instances"].get("1", {})
            return [tiers.get(tier) for tier in ("gpu", "cpu", "disk")]

        until(lambda: found() == [STORED[0]] * 3, "a tier's blocks are not known")
    finally:
        indexer.kill()
        indexer.wait()


def first_byte(url, prompt, **more):
    """Returns the seconds until the first token, cached tokens, and the answer's headers."""
    more |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body_of(prompt, 4, **more)).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=WATCHDOG) as answer:
        line = answer.readline()
        took = time.perf_counter() - start
        lines = [line, *answer.readlines()]
    usage = json.loads(lines[-4].removeprefix(b"data: "))["usage"]
    return took, (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0), answer.headers


@soak
def test_times(cluster):
    """Prints medians of TTFT, with the least and the most of ROUNDS, in turns."""
    a, b = cluster.machines
    cluster.announce((NEVER, FAST))
    chance, times = random.Random(3), {}
    rounds = int(os.environ.get("RIPIENO_ROUNDS", "7"))
    for number in range(rounds + 1):
        new, other = ([chance.randrange(10, 2000) for _ in range(900)] for _ in range(2))
        source = {
            "kv_request_id": f"by-hand{number}",
            "remote_host": "127.0.0.1",
            "remote_port": a.p2p,
        }
        named = {"kv_transfer_params": {"remote_kv_source": source}}

        def take(what, url, prompt, cached, number=number, **more):
            # The stores of the request before it are not part of the time.
            time.sleep(0.5)
            took, found, headers = first_byte(url, prompt, **more)
            assert found == cached, what
            # The first round is a warm-up.
            if number:
                times.setdefault(what, []).append(took * 1e3)
            return headers

        take("computing, at A", a.url, new, 0)
        take("GPU's blocks, at A", a.url, new, 896)
        take("computing, at A", a.url, other, 0)
        found = take("computing, through the router", cluster.url, other[::-1], 0)
        assert (found["X-Ripieno-Engine"], found["X-Ripieno-Source"]) == (b.url, None)
        cluster.knows(a, 28)
        found = take("from A, through the router", cluster.url, new, 896)
        assert (found["X-Ripieno-Engine"], found["X-Ripieno-Source"]) == (b.url, a.url)
        take("GPU's blocks, through the router", cluster.url, new, 896)
        take("from A, named by the request", b.url, other, 896, **named)
        fetch(f"{a.url}/reset_prefix_cache", {})
        take("host memory's blocks, at A", a.url, new, 896)
    with open(os.environ.get("RIPIENO_TIMES", os.devnull), "w") as file:
        for what, each in times.items():
            line = (
                f"{what:34} {statistics.median(each):6.1f} ms ({min(each):.1f} to {max(each):.1f})"
            )
            print(line, file=file)
            print(line)
