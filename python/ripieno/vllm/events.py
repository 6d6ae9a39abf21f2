"""Events that vLLM publishes about the store's blocks, for routers and other prefix indexes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.request import Request


class Events:
    """Blocks stored and dropped since the last take()."""

    def __init__(self) -> None:
        self.waiting: list[KVCacheEvent] = []

    def describe(
        self,
        request: Request,
        group: int,
        run: range,
        hashes: tuple[BlockHash | None, Sequence[bytes]],
        block_size: int,
        kind: tuple[str, int | None],
    ) -> BlockStored:
        """Returns the event for consecutive blocks of a request in a group. Call it while the
        request exists.

        hashes: vLLM's hash of the block before them, or None, and their own. kind: that of the
        group, and its window, by which indexes tell the main group.
        """
        features, at = [], 0
        for block in run:
            start = block * block_size
            found, at = generate_block_hash_extra_keys(request, start, start + block_size, at)
            features.append(found)
        lora = request.lora_request
        parent, own = hashes
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(each)) for each in own],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(request.all_token_ids[run.start * block_size : run.stop * block_size]),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(features),
            group_idx=group,
            kv_cache_spec_kind=kind[0],
            kv_cache_spec_sliding_window=kind[1],
        )

    def removed(self, group: int | None, hashes: list[ExternalBlockHash]) -> None:
        self.waiting.append(BlockRemoved(hashes, medium=MEDIUM_STORAGE, group_idx=group))

    def removed_keys(self, hashes: Sequence[bytes]) -> None:
        """In the only group, by vLLM's hashes."""
        if hashes:
            self.removed(0, [maybe_convert_block_hash(BlockHash(each)) for each in hashes])

    def cleared(self) -> None:
        self.waiting.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        waiting, self.waiting = self.waiting, []
        return waiting
