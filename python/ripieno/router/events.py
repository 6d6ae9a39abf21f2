"""KV events of an engine, over ZeroMQ, as vLLM publishes them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from ripieno.router.directory import GPU, Feed

if TYPE_CHECKING:
    from ripieno.router.choice import Engine
    from ripieno.router.directory import Blocks

SECONDS = 5.0
"""Deadline of a replay, and of each of its messages."""
REMOTE = "REMOTE"
"""Locality of blocks that other engines can reach without this one."""

logger = logging.getLogger("ripieno.router")


def apply(blocks: Blocks, batch: KVEventBatch) -> None:
    """Applies a batch, without blocks that are more than their tokens: those of LoRAs, of images,
    and with a salt."""
    for event in batch.events:
        if isinstance(event, BlockStored):
            if event.locality == REMOTE or event.lora_name or any(event.extra_keys or ()):
                continue
            place = event.medium or GPU, event.group_idx
            parent, tokens = event.parent_block_hash, event.token_ids
            blocks.stored(event.block_hashes, parent, tokens, event.block_size, place)
        elif isinstance(event, BlockRemoved):
            if event.locality != REMOTE:
                blocks.removed(event.block_hashes, (event.medium or GPU, event.group_idx))
        else:
            # It names no medium: what is left in other ones is not known any more.
            blocks.cleared()


class Reader:
    """Reads an engine's events into its blocks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        blocks = engine.blocks
        self.feed: Feed[KVEventBatch] = Feed(lambda batch: apply(blocks, batch), blocks.cleared)
        self.context = zmq.asyncio.Context.instance()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        try:
            await self._follow()
        except zmq.ZMQError as error:
            logger.error("%s: its events are not read: %s", self.engine.member.engine, error)

    async def _follow(self) -> None:
        with self.context.socket(zmq.SUB) as socket:
            socket.set_hwm(100_000)
            socket.connect(self.engine.member.events)
            socket.subscribe(b"")
            # Those before this router.
            await self._resume(0)
            while True:
                try:
                    _, number, payload = await socket.recv_multipart()
                    at, batch = int.from_bytes(number, "big"), self.decoder.decode(payload)
                    if not self.feed.take(at, batch.ts, batch):
                        await self._resume(at)
                        self.feed.take(at, batch.ts, batch)
                except (msgspec.MsgspecError, ValueError) as error:
                    # It is one that was lost.
                    url = self.engine.member.engine
                    logger.warning("%s: an event that is not valid: %r", url, error)

    async def _resume(self, until: int) -> None:
        replayed: list[tuple[int, float, KVEventBatch]] = []
        try:
            await asyncio.wait_for(self._replay(replayed), SECONDS)
        except (asyncio.TimeoutError, msgspec.MsgspecError, ValueError, OverflowError) as error:
            url = self.engine.member.engine
            logger.warning("%s: events are not repeated: %r", url, error)
        self.feed.resume(replayed, until)

    async def _replay(self, replayed: list[tuple[int, float, KVEventBatch]]) -> None:
        """Adds the batches from the feed's next one on, as far as the engine has them."""
        if self.engine.member.replay is None:
            return
        with self.context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.engine.member.replay)
            await socket.send_multipart([b"", self.feed.next.to_bytes(8, "big")])
            while True:
                _, _, number, payload = await socket.recv_multipart()
                at = int.from_bytes(number, "big", signed=True)
                if at < 0:
                    return
                batch = self.decoder.decode(payload)
                replayed.append((at, batch.ts, batch))
