"""Starts the router; see docs/start/two-machines.md."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

import aiohttp
from aiohttp import web

from ripieno.router.choice import POLICIES, Engine
from ripieno.router.etcd import Etcd
from ripieno.router.member import arguments
from ripieno.router.proxy import Router


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    flag = parser.add_argument
    flag("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="(%(default)s)")
    flag("--policy", choices=POLICIES, default=POLICIES[0], help="(%(default)s)")
    flag("--timeout", type=float, default=600.0, help="seconds between bytes of an engine")
    asked = parser.parse_args(args)
    host, _, port = asked.listen.rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"--listen: {asked.listen!r} was given; give HOST:PORT")
    asked.listen = host, int(port)
    return asked


async def run(asked: argparse.Namespace) -> None:
    # Here, because it imports vLLM.
    from ripieno.router.events import Reader

    async def follow(engine: Engine) -> None:
        await Reader(engine).follow()

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Bodies are passed on as they come.
    # A connection of its own for each request: one that an engine is about to close would take a
    # request, which is not sent again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        router = Router(asked.policy, session, asked.timeout, follow)
        watching = asyncio.create_task(
            router.watch(Etcd(session, asked.etcd.split(",")), asked.prefix)
        )
        runner = web.AppRunner(router.application(), handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, *asked.listen).start()
            await stop.wait()
        finally:
            watching.cancel()
            router.update({})
            await runner.cleanup()


def main(args: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run(parse(args)))


if __name__ == "__main__":
    main()
