"""The HTTP server: sends each request to the engine of its plan."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from ripieno.router.choice import Engine, Member, Plan, choose
from ripieno.router.etcd import ERRORS, Etcd

BODY_BYTES_MAX = 64 << 20
CONNECT_SECONDS = 5.0
TOKENIZE_SECONDS = 5.0
FAILED_SECONDS = 5.0
"""An engine that failed is not asked for so long, nor named to others, if there are others."""
TRIES = 2
"""Engines that are tried for a request, which is sent to one of them at most."""
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors of a connection that was not made: nothing was sent."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = {
    COMPLETIONS: ["prompt", "add_special_tokens"],
    CHAT: [
        "messages",
        "tools",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
    ],
}
"""Parts of a request that make its tokens."""
HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"}
HOP |= {"upgrade"}
"""Headers of one connection."""
ENGINE, SOURCE = "X-Ripieno-Engine", "X-Ripieno-Source"
"""Headers of an answer: the engine, and the one that it was told to take blocks from."""

logger = logging.getLogger("ripieno.router")


class Router:
    """follow: reads an engine's events until it is cancelled."""

    def __init__(
        self,
        policy: str,
        session: aiohttp.ClientSession,
        seconds: float,
        follow: Callable[[Engine], Any],
    ) -> None:
        self.policy, self.session, self.follow = policy, session, follow
        self.timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_SECONDS, sock_read=seconds)
        self.engines: dict[str, Engine] = {}
        """By key in etcd."""
        self.readers: dict[str, asyncio.Task[None]] = {}
        self.turn = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/members", self.members)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    # Members.

    async def watch(self, etcd: Etcd, prefix: str) -> None:
        """Keeps the members those of etcd, until it is cancelled. Without etcd they stay."""
        said = ""
        while True:
            news = "members are those of etcd"
            try:
                found, revision = await etcd.range(prefix)
                self.update(found)
                await etcd.changed(prefix, revision)
            except ERRORS as error:
                news = f"members stay as they are: etcd: {error!r}"
                await asyncio.sleep(1)
            if news != said:
                said = news
                logger.info("%s", news)

    def update(self, found: dict[str, bytes]) -> None:
        """Takes over members by key: new ones have no known blocks, and others keep theirs."""
        members = {}
        for key, value in found.items():
            try:
                members[key] = msgspec.json.decode(value, type=Member)
            except msgspec.MsgspecError as error:
                logger.warning("%s in etcd is no member: %s", key, error)
        for key, engine in list(self.engines.items()):
            if members.get(key) != engine.member:
                logger.info("%s has left", engine.member.engine)
                del self.engines[key]
                self.readers.pop(key).cancel()
        for key, member in members.items():
            if key not in self.engines:
                logger.info("%s has joined", member.engine)
                self.engines[key] = Engine(member)
                self.readers[key] = asyncio.create_task(self.follow(self.engines[key]))

    def live(self, without: Sequence[Engine] = ()) -> list[Engine]:
        """Returns the engines to choose from: those that have not failed, if there are any."""
        rest = [engine for engine in self.engines.values() if engine not in without]
        now = time.monotonic()
        return [engine for engine in rest if now - engine.failed > FAILED_SECONDS] or rest

    async def members(self, request: web.Request) -> web.Response:
        def described(engine: Engine) -> dict[str, Any]:
            media: dict[str, int] = {}
            for places in engine.blocks.places.values():
                for medium in {medium for medium, _ in places}:
                    media[medium] = media.get(medium, 0) + 1
            member = msgspec.to_builtins(engine.member)
            return {**member, "blocks": media, "requests": engine.requests}

        return web.json_response([described(engine) for engine in self.engines.values()])

    # Requests.

    async def tokens(self, path: str, body: dict[str, Any], engines: Sequence[Engine]) -> list[int]:
        """Returns a prompt's tokens, asking one of the engines for those of a text. Empty if they
        are not known, or do not tell which blocks are the prompt's: the load decides then."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if path == COMPLETIONS and isinstance(prompt, list):
            return _checked(prompt)
        if path == COMPLETIONS and not isinstance(prompt, str):
            return []
        asked = {key: body[key] for key in ["model", *TEXTS[path]] if key in body}
        asked |= {"prompt": prompt} if path == COMPLETIONS else {}
        for engine in engines[:TRIES]:
            url = f"{engine.member.engine}/tokenize"
            timeout = aiohttp.ClientTimeout(TOKENIZE_SECONDS)
            try:
                async with self.session.post(url, json=asked, timeout=timeout) as answer:
                    if answer.status != 200:
                        # The engine that gets the request says why.
                        return []
                    return _checked(json.loads(await answer.read())["tokens"])
            except ERRORS as error:
                engine.failed = time.monotonic()
                if not isinstance(error, UNREACHED):
                    break
        return []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body, path = await request.read(), request.path
        parsed: dict[str, Any] = {}
        if request.method == "POST" and path in (COMPLETIONS, CHAT):
            # The engine answers what is not valid.
            with contextlib.suppress(ValueError):
                found = json.loads(body)
                parsed = found if isinstance(found, dict) else {}
        model = parsed.get("model")
        serving = [engine for engine in self.live() if engine.member.model == model]
        told = serving and not _is_more_than_tokens(parsed)
        tokens = await self.tokens(path, parsed, serving) if told else []
        self.turn += 1
        tried: list[Engine] = []
        while len(tried) < TRIES and (engines := self.live(tried)):
            # Those with its model, else all: one says that it is not there, or has the adapter.
            engines = [each for each in engines if each.member.model == model] or engines
            plan = choose(self.policy, engines, tokens, self.turn)
            sent = body
            if "kv_transfer_params" in parsed:
                plan = dataclasses.replace(plan, source=None)
            elif plan.source is not None:
                sent = json.dumps({**parsed, "kv_transfer_params": _source(plan.source)}).encode()
            answer = await self.forward(request, sent, plan)
            if answer is not None:
                return answer
            tried.append(plan.engine)
        return _error(503, "no engine is reached" if tried else "no engine is known")

    async def forward(
        self, request: web.Request, body: bytes, plan: Plan
    ) -> web.StreamResponse | None:
        """Sends a request to an engine, and its answer to the client. Returns None if the engine is
        not reached; later it may have begun the request, which another one should not get. Raises
        its error once a part of the answer was sent on, which ends the connection."""
        engine, waits = plan.engine, plan.computes
        drop = HOP | {"host", "content-length"}
        headers = {key: value for key, value in request.headers.items() if key.lower() not in drop}
        url = engine.member.engine + request.path_qs
        asked = self.session.request(
            request.method,
            url,
            data=body,
            headers=headers,
            skip_auto_headers=["Accept-Encoding", "Content-Type", "User-Agent"],
            timeout=self.timeout,
            allow_redirects=False,
        )
        answer = None
        engine.requests += 1
        engine.prompts += waits
        try:
            async with asked as upstream:
                part = await upstream.content.readany()
                engine.prompts -= waits
                waits = 0.0
                kept = {k: v for k, v in upstream.headers.items() if k.lower() not in HOP}
                answer = web.StreamResponse(status=upstream.status, headers=kept)
                answer.headers[ENGINE] = engine.member.engine
                if plan.source is not None:
                    answer.headers[SOURCE] = plan.source.member.engine
                await answer.prepare(request)
                while part:
                    await answer.write(part)
                    part = await upstream.content.readany()
                await answer.write_eof()
                return answer
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if answer is not None:
                raise
            engine.failed = time.monotonic()
            logger.warning("%s does not answer: %r", engine.member.engine, error)
            if isinstance(error, UNREACHED):
                return None
            status = 504 if isinstance(error, asyncio.TimeoutError) else 502
            return _error(status, "the engine did not answer; the request is not sent to another")
        finally:
            engine.requests -= 1
            engine.prompts -= waits


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "code": status}}, status=status)


def _checked(tokens: list[Any]) -> list[int]:
    """Returns the tokens, or none if one of them is something else."""
    are_tokens = all(type(each) is int and 0 <= each < 1 << 32 for each in tokens)
    return tokens if are_tokens else []


def _is_more_than_tokens(body: dict[str, Any]) -> bool:
    """Returns true if a prompt's blocks are not told by its tokens: it has a salt, is cut, or is
    not only text."""
    messages = body.get("messages")
    parts = [
        part
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    ]
    is_text = all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
    return bool(body.get("cache_salt") or body.get("truncate_prompt_tokens") or not is_text)


def _source(peer: Engine) -> dict[str, Any]:
    """Returns the parameters with which vLLM's `p2p` tier asks a peer."""
    host, _, port = (peer.member.p2p or "").rpartition(":")
    name = {"kv_request_id": uuid.uuid4().hex, "remote_host": host, "remote_port": int(port)}
    return {"remote_kv_source": name}
