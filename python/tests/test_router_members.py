"""Members by etcd's leases, and requests through the router. The engines are stand-ins."""

import asyncio
import contextlib
import json
import time

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from etcd_server import Server
from waiting import WATCHDOG, kept_port

from ripieno.router import member
from ripieno.router.etcd import ERRORS, Etcd
from ripieno.router.proxy import Router

TTL = 2
BLOCK = 4
PROMPT = list(range(42))
METRICS = 'vllm:cache_config_info{block_size="4",cache_dtype="auto",engine="0"} 1.0\n'


class Stand:
    """An engine that answers with its number, and what it was asked."""

    def __init__(self, name="model"):
        self.name, self.asked, self.is_healthy = name, [], True
        self.fails = None
        """None, or where it ends the connection of a completion: "before" or "after" a part; or
        "never", and it does not answer either; or that of "tokenize"."""
        self.tokenized = 0
        self.port = kept_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def answer(self, request):
        path = request.path
        if path == "/health":
            return web.Response(status=200 if self.is_healthy else 503)
        if path == "/v1/models":
            adapter = {"id": "adapter", "parent": self.name}
            return web.json_response({"data": [adapter, {"id": self.name, "parent": None}]})
        if path == "/version":
            return web.json_response({"version": "0.32"})
        if path == "/metrics":
            return web.Response(text=METRICS)
        body = await request.read()
        if path == "/tokenize":
            self.tokenized += 1
            if self.fails == "tokenize":
                request.transport.abort()
            asked = json.loads(body)
            is_valid = asked["model"] == self.name and asked.get("messages") != 7
            return web.json_response({"tokens": PROMPT}, status=200 if is_valid else 400)
        self.asked.append((request.method, request.path_qs, body))
        if self.fails == "never":
            await asyncio.sleep(3600)
        found = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await found.prepare(request)
        if self.fails != "before":
            await found.write(b"data: %d\n\n" % self.port)
        if self.fails:
            await asyncio.sleep(0.05)
            request.transport.abort()
            return found
        await found.write(b"data: [DONE]\n\n")
        return found

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield self
        finally:
            await runner.cleanup()


async def until(is_so, why):
    end = time.monotonic() + WATCHDOG
    while not is_so():
        assert time.monotonic() < end, why
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def routing(policy="prefix", seconds=5.0):
    """Yields a router, and a session with its URL."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        router = Router(policy, session, seconds, lambda engine: asyncio.sleep(3600))
        runner = web.AppRunner(router.application(), handler_cancellation=True)
        await runner.setup()
        try:
            await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
            port = site._server.sockets[0].getsockname()[1]
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                yield router, client
        finally:
            router.update({})
            await runner.cleanup()


def announcement(url, address="127.0.0.1:1", **flags):
    flags = {"tokens-per-second": 100, "token-bytes": 1e6, "ttl": TTL} | flags
    args = ["--etcd", address, "--engine", url, "--events", "tcp://127.0.0.1:1"]
    for flag, value in flags.items():
        args += [f"--{flag}", str(value)]
    return member.parse(args)


@contextlib.asynccontextmanager
async def announced(*args, **flags):
    stop = asyncio.Event()
    task = asyncio.create_task(member.hold(announcement(*args, **flags), stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None


async def join(router, *stands, **flags):
    """Adds engines as members, without etcd."""
    async with aiohttp.ClientSession() as session:
        asked = [announcement(stand.url, **flags) for stand in stands]
        found = [await member.ask(session, each) for each in asked]
    router.update({each.engine: member.msgspec.json.encode(each) for each in found})
    return [router.engines[each.engine] for each in found]


def store(engine, count, medium):
    tokens = PROMPT[: count * BLOCK]
    engine.blocks.stored(list(range(count)), None, tokens, BLOCK, (medium, 0))


async def post(client, body, path="/v1/completions"):
    async with client.post(path, json=body) as answer:
        return answer.headers, await answer.text()


def test_members_come_and_go_with_their_leases(tmp_path):
    async def run(etcd):
        async with (
            Stand().running() as one,
            Stand().running() as two,
            routing() as (router, _),
            aiohttp.ClientSession() as session,
        ):
            watching = asyncio.create_task(router.watch(Etcd(session, [etcd.address]), "/x/"))

            def urls():
                return sorted(engine.member.engine for engine in router.engines.values())

            flags = {"address": etcd.address, "prefix": "/x/"}
            async with announced(one.url, **flags):
                await until(lambda: urls() == [one.url], "one joins")
                found = router.engines["/x/" + one.url]
                assert (found.member.model, found.member.block_tokens) == ("model", 4)
                async with announced(two.url, **flags) as other:
                    await until(lambda: urls() == sorted([one.url, two.url]), "two joins")
                    two.is_healthy = False
                    await until(lambda: urls() == [one.url], "two is not healthy")
                    two.is_healthy = True
                    await until(lambda: len(urls()) == 2, "two is healthy again")
                    # etcd is gone for longer than a lease, and comes back with its data. Meanwhile
                    # two's member is killed, so that its lease ends by itself.
                    etcd.kill()
                    other.cancel()
                    await asyncio.sleep(TTL + 1)
                    assert len(urls()) == 2
                    etcd.start()
                    await until(lambda: urls() == [one.url], "two leaves after etcd is back")
                    assert router.engines["/x/" + one.url] is found, "its blocks are still known"
            await until(lambda: not urls(), "one leaves")
            watching.cancel()

    with Server(tmp_path / "etcd") as etcd:
        asyncio.run(run(etcd))


def test_one_address_of_etcd_is_enough(tmp_path):
    async def run(etcd):
        async with aiohttp.ClientSession() as session:
            client, lease = Etcd(session, ["127.0.0.1:1", etcd.address]), None
            end = time.monotonic() + WATCHDOG
            while lease is None:
                assert time.monotonic() < end, "etcd does not start"
                with contextlib.suppress(*ERRORS):
                    lease = await client.grant(60)
            await client.put("/x/a", "value", lease)
            assert (await client.range("/x/"))[0] == {"/x/a": b"value"}
            assert await client.keep(lease)
            await client.revoke(lease)
            assert (await client.range("/x/"))[0] == {}
            assert not await client.keep(lease)

    with Server(tmp_path / "etcd") as etcd:
        asyncio.run(run(etcd))


def test_a_request_goes_where_its_prefix_is():
    async def run():
        async with (
            Stand("other").running() as other,
            Stand().running() as one,
            Stand().running() as two,
            routing() as (router, client),
        ):
            assert (await post(client, {"model": "model"}))[1].startswith('{"error"')
            *_, second = await join(router, other, one, two)
            store(second, 10, "CPU")
            body = {"model": "model", "prompt": PROMPT, "stream": True}
            for _ in range(4):
                headers, text = await post(client, body)
                assert text == f"data: {two.port}\n\ndata: [DONE]\n\n"
                assert headers["X-Ripieno-Engine"] == two.url
            assert [json.loads(asked) for _, _, asked in two.asked] == [body] * 4
            # Texts have the tokens that an engine with the model says.
            messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
            for path, said in [
                ("/v1/completions", {"prompt": "hello"}),
                ("/v1/completions", {"prompt": ["hello"]}),
                ("/v1/chat/completions", {"messages": messages}),
            ]:
                for _ in range(2):
                    _, text = await post(client, {"model": "model"} | said, path)
                    assert text.startswith(f"data: {two.port}\n")
            # These are not told by their tokens, or are something else.
            for more in [
                {"cache_salt": "x"},
                {"model": "adapter"},
                {"model": ["x"]},
                {"prompt": [PROMPT, PROMPT]},
                {"prompt": [-1, *PROMPT]},
                {"prompt": [1 << 40, *PROMPT]},
                {"prompt": {"a": 1}},
                {"messages": 7},
                {"messages": [7, {"content": [{"type": "image_url"}]}]},
            ]:
                path = "/v1/chat/completions" if "messages" in more else "/v1/completions"
                texts = {(await post(client, body | more, path))[1] for _ in range(4)}
                assert len(texts) > 1, more
            async with client.post("/v1/completions", data=b"\xff[") as answer:
                assert answer.status == 200
            async with client.get("/v1/models?x=1") as answer:
                assert (await answer.json())["data"]
            async with client.get("/members") as answer:
                blocks = [found["blocks"] for found in await answer.json()]
            assert blocks == [{}, {}, {"CPU": 10}]

    asyncio.run(run())


@pytest.mark.parametrize("is_named", [False, True])
def test_an_engine_is_told_where_to_fetch(is_named):
    async def run():
        async with (
            Stand().running() as one,
            Stand().running() as two,
            routing() as (router, client),
        ):
            flags = {"link-gbps": 100, "p2p": "10.0.0.7:5710"}
            first, second = await join(router, one, two, **flags)
            store(second, 10, "STORAGE")
            second.prompts = 5.0
            body = {"model": "model", "prompt": PROMPT}
            if is_named:
                body["kv_transfer_params"] = {"do_remote_decode": True}
            headers, _ = await post(client, body)
            assert headers.get("X-Ripieno-Source") == (None if is_named else two.url)
            (_, _, asked), *_ = one.asked
            asked = json.loads(asked)
            if is_named:
                assert asked == body
                return
            source = asked.pop("kv_transfer_params")["remote_kv_source"]
            assert asked == body
            assert len(source.pop("kv_request_id")) == 32
            assert source == {"remote_host": "10.0.0.7", "remote_port": 5710}
            # It is not named when it has failed.
            second.failed = time.monotonic()
            await post(client, body)
            assert json.loads(one.asked[1][2]) == body
            assert (first.requests, first.prompts, second.requests) == (0, 0.0, 0)

    asyncio.run(run())


def test_a_request_that_was_sent_is_not_sent_to_another_engine():
    """It may be what made the first one fail, or be at work there."""

    async def run():
        async with (
            Stand().running() as one,
            Stand().running() as two,
            routing(seconds=10) as (router, client),
        ):
            first, _ = await join(router, one, two)
            store(first, 10, "GPU")
            body = {"model": "model", "prompt": PROMPT}
            for where, status in (("before", 502), ("never", 504)):
                one.fails, first.failed = where, float("-inf")
                async with client.post("/v1/completions", json=body) as answer:
                    assert answer.status == status, where
                    assert "not sent to another" in await answer.text()
            assert (len(one.asked), len(two.asked)) == (2, 0)
            first.failed = float("inf")
            assert (await post(client, body))[1].startswith(f"data: {two.port}\n")
            assert len(one.asked) == 2, "it is not asked for a while"
            one.fails, first.failed = "after", float("-inf")
            with pytest.raises(aiohttp.ClientError):
                await post(client, body)
            assert (len(one.asked), len(two.asked)) == (3, 1)
            # Neither is a text, whose tokens are asked for first.
            one.fails, first.failed, asked = "tokenize", float("-inf"), len(two.asked)
            await post(client, body | {"prompt": "text"})
            assert two.tokenized == 0 and len(one.asked) + len(two.asked) == 3 + asked + 1
            assert [each.requests for each in router.engines.values()] == [0, 0]

    asyncio.run(run())


def test_two_engines_are_tried_at_most():
    async def run():
        async with routing("round-robin") as (router, client):
            gone = [Stand() for _ in range(4)]
            async with contextlib.AsyncExitStack() as stack:
                for each in gone:
                    await stack.enter_async_context(each.running())
                members = await join(router, *gone)
            async with client.post("/v1/completions", json={"model": "model"}) as answer:
                assert answer.status == 503
                assert "no engine is reached" in await answer.text()
            assert sum(each.failed > float("-inf") for each in members) == 2

    asyncio.run(run())


def test_an_engine_that_is_gone():
    async def run():
        async with Stand().running() as two, routing() as (router, client):
            one = Stand()
            async with one.running():
                first, _ = await join(router, one, two)
            store(first, 10, "GPU")
            _, text = await post(client, {"model": "model", "prompt": PROMPT})
            assert text.startswith(f"data: {two.port}\n")

    asyncio.run(run())


def test_a_key_that_is_no_member_is_left_out():
    async def run():
        async with routing() as (router, _), Stand().running() as one:
            await join(router, one)
            (key,) = router.engines
            good = member.msgspec.json.encode(router.engines[key].member)
            bad = [b"", b"{}", good.replace(b'"token_bytes":1000000', b'"token_bytes":-1')]
            router.update({str(at): value for at, value in enumerate(bad)} | {key: good})
            assert list(router.engines) == [key]

    asyncio.run(run())


@pytest.mark.parametrize("flags", [{"ttl": 1}, {"token-bytes": 0}, {"read": "CPU=-1"}])
def test_flags_that_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        announcement("http://127.0.0.1:1", **flags)
    assert "error: " in capsys.readouterr().err
