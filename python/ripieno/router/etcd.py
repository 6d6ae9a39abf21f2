"""Leases, keys and watches of etcd, over its JSON gateway (etcd 3.4 and later)."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import aiohttp

SECONDS = 5.0
"""Deadline of a call."""
WATCH_SECONDS = 30.0
"""A watch that is silent for so long is asked again: the machine may be gone."""
ERRORS = (
    *(aiohttp.ClientError, asyncio.TimeoutError, OSError),
    *(ValueError, LookupError, TypeError, AttributeError),
)
"""Raised by calls, if nobody answers, or answers something else."""


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


def _after(prefix: str) -> str:
    """Returns the end of the range of keys with a prefix in ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class Etcd:
    """addresses: HOST:PORT of one cluster. The one that answered last is asked first."""

    def __init__(self, session: aiohttp.ClientSession, addresses: list[str]) -> None:
        self.session, self.addresses = session, addresses

    async def _call(self, path: str, **message: Any) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(SECONDS)
        for left in reversed(range(len(self.addresses))):
            url = f"http://{self.addresses[0]}/v3/{path}"
            try:
                async with self.session.post(url, json=message, timeout=timeout) as answer:
                    answer.raise_for_status()
                    found: dict[str, Any] = json.loads(await answer.read())
                    return found
            except ERRORS:
                self.addresses.append(self.addresses.pop(0))
                if not left:
                    raise
        raise ValueError("no address of etcd")

    async def grant(self, seconds: int) -> str:
        """Returns a new lease."""
        return str((await self._call("lease/grant", TTL=seconds))["ID"])

    async def keep(self, lease: str) -> bool:
        """Prolongs a lease. Returns False if it has ended."""
        found = await self._call("lease/keepalive", ID=lease)
        return int(found["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: str) -> None:
        await self._call("lease/revoke", ID=lease)

    async def put(self, key: str, value: str, lease: str) -> None:
        """Sets a key that ends with the lease."""
        await self._call("kv/put", key=_text(key), value=_text(value), lease=lease)

    async def range(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """Returns values by key, and the revision of the answer."""
        found = await self._call("kv/range", key=_text(prefix), range_end=_text(_after(prefix)))
        pairs = found.get("kvs", [])
        values = {
            base64.b64decode(each["key"]).decode(): base64.b64decode(each.get("value", ""))
            for each in pairs
        }
        return values, int(found["header"]["revision"])

    async def changed(self, prefix: str, revision: int) -> None:
        """Waits until one of the keys changes after a revision, or for WATCH_SECONDS."""
        asked = {
            "key": _text(prefix),
            "range_end": _text(_after(prefix)),
            "start_revision": revision + 1,
        }
        timeout = aiohttp.ClientTimeout(None, connect=SECONDS, sock_read=WATCH_SECONDS)
        url = f"http://{self.addresses[0]}/v3/watch"
        message = {"create_request": asked}
        async with self.session.post(url, json=message, timeout=timeout) as answer:
            answer.raise_for_status()
            try:
                # The first line says that the watch is there.
                async for line in answer.content:
                    if not json.loads(line)["result"].get("created"):
                        return
            except asyncio.TimeoutError:
                return
