"""Announces an engine to routers, while it is healthy: a key in etcd with a lease.

    python -m ripieno.router.member --etcd 10.0.0.9:2379 --engine http://10.0.0.1:8000 \\
        --events tcp://10.0.0.1:5557 --replay tcp://10.0.0.1:5558 --p2p 10.0.0.1:5710 \\
        --tokens-per-second 8000 --token-bytes 131072 --link-gbps 25

Runs beside its engine, may start before it, and ends with SIGTERM or Ctrl-C, when the key goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
from typing import Any

import aiohttp
import msgspec

from ripieno.router.choice import Member
from ripieno.router.etcd import ERRORS, Etcd

PREFIX = "/ripieno/engines/"
SECONDS = 5.0
"""Deadline of an engine's answer."""
LABELS = ("block_size", "cache_dtype", "prefix_caching_hash_algo")
"""Parts of vLLM's cache configuration that two engines must have in common."""

logger = logging.getLogger("ripieno.router")


def arguments(docs: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags of routers and members."""
    parser = argparse.ArgumentParser(
        description=docs, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--etcd", required=True, metavar="HOST:PORT,...", help="one cluster's addresses")
    flag("--prefix", default=PREFIX, help="of the keys in etcd (%(default)s)")
    return parser


def _medium(text: str) -> tuple[str, float]:
    medium, _, speed = text.partition("=")
    return medium, float(speed)


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    flag = parser.add_argument
    flag("--engine", required=True, metavar="URL", help="as routers reach it")
    flag("--events", required=True, metavar="tcp://HOST:PORT", help="of its KV events")
    flag("--replay", metavar="tcp://HOST:PORT", help="the replay_endpoint of its KV events")
    flag("--p2p", metavar="HOST:PORT", help="of its p2p tier, as other engines reach it")
    flag("--store", default="", metavar="NAME", help="of a server's store that members share")
    flag("--epoch", default="", help="distinguishes weights of the same name")
    flag("--ttl", type=int, default=10, help="seconds of the lease (%(default)s)")
    flag("--tokens-per-second", type=float, required=True, help="prompt tokens that it computes")
    flag("--token-bytes", type=float, required=True, help="KV cache of a token")
    flag(
        "--read",
        type=_medium,
        action="append",
        metavar="MEDIUM=GB/S",
        help="to the GPU, for CPU (20) and STORAGE (5)",
    )
    flag("--link-gbps", type=float, help="to other machines; nothing is fetched without it")
    flag("--link-latency-ms", type=float, default=1.0, help="of a fetch (%(default)s)")
    asked = parser.parse_args(args)
    if asked.ttl < 2:
        parser.error(f"--ttl: {asked.ttl} s were given; give at least 2")
    found = {
        "engine": asked.engine.rstrip("/"),
        "events": asked.events,
        "replay": asked.replay,
        "p2p": asked.p2p,
        "store": asked.store,
        "costs": {
            "tokens_per_second": asked.tokens_per_second,
            "token_bytes": asked.token_bytes,
            "read": {"CPU": 20.0, "STORAGE": 5.0} | dict(asked.read or []),
            "link_gbps": asked.link_gbps,
            "link_latency_ms": asked.link_latency_ms,
        },
    }
    try:
        asked.member = msgspec.convert(found, Member)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    return asked


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    timeout = aiohttp.ClientTimeout(SECONDS)
    async with session.get(url, timeout=timeout) as answer:
        answer.raise_for_status()
        return await answer.text()


async def ask(session: aiohttp.ClientSession, asked: argparse.Namespace) -> Member:
    """Returns the member, as its engine describes itself. Raises an error of ERRORS."""
    member: Member = asked.member
    url = member.engine
    models: list[dict[str, Any]] = json.loads(await _get(session, f"{url}/v1/models"))["data"]
    base = [each["id"] for each in models if not each.get("parent")]
    version = json.loads(await _get(session, f"{url}/version"))["version"]
    metrics = await _get(session, f"{url}/metrics")
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
    if not base or not labels.get("block_size", "").isdigit():
        raise ValueError(f"{url} names no model or no block size: is it vLLM?")
    identity = {label: labels.get(label, "") for label in LABELS}
    identity |= {"model": base[0], "vllm": version, "epoch": asked.epoch}
    size = int(labels["block_size"])
    return msgspec.structs.replace(member, model=base[0], block_tokens=size, identity=identity)


async def hold(asked: argparse.Namespace, stop: asyncio.Event) -> None:
    """Holds the lease while the engine is healthy, until `stop`."""
    lease: str | None = None
    said = ""
    async with aiohttp.ClientSession() as session:
        etcd = Etcd(session, asked.etcd.split(","))
        while not stop.is_set():
            news = "announced"
            try:
                await _get(session, f"{asked.member.engine}/health")
            except ERRORS as error:
                news = f"not announced, because it is not healthy: {error!r}"
                await _end(etcd, lease)
                lease = None
            else:
                try:
                    if lease is None or not await etcd.keep(lease):
                        lease = await _announce(session, etcd, asked)
                except ERRORS as error:
                    # A lease that is there goes on, or ends by itself.
                    news = f"not announced: {error!r}"
            if news != said:
                said = news
                logger.info("%s: %s", asked.member.engine, news)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), asked.ttl / 3)
        await _end(etcd, lease)


async def _announce(session: aiohttp.ClientSession, etcd: Etcd, asked: argparse.Namespace) -> str:
    """Sets the key, and returns its lease."""
    member = await ask(session, asked)
    lease = await etcd.grant(asked.ttl)
    await etcd.put(asked.prefix + member.engine, msgspec.json.encode(member).decode(), lease)
    return lease


async def _end(etcd: Etcd, lease: str | None) -> None:
    if lease is not None:
        # If etcd does not answer, the lease ends by itself.
        with contextlib.suppress(*ERRORS):
            await etcd.revoke(lease)


async def run(asked: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await hold(asked, stop)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run(parse()))
