"""Events that vLLM publishes about the store's blocks, for routers and other prefix indexes."""

from vllm.distributed.kv_events import MEDIUM_STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)


class Events:
    """Blocks stored and dropped since the last take()."""

    def __init__(self):
        self.waiting = []

    def describe(self, request, at, hashes, block_size):
        """Returns the event for block `at` of a request. Call it while the request exists."""
        start, end = at * block_size, (at + 1) * block_size
        features, _ = generate_block_hash_extra_keys(request, start, end, 0)
        lora = request.lora_request
        parent, own = hashes
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(own)],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(request.all_token_ids[start:end]),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([features]),
            group_idx=0,
        )

    def removed(self, hashes):
        if hashes:
            hashes = [maybe_convert_block_hash(each) for each in hashes]
            self.waiting.append(BlockRemoved(hashes, medium=MEDIUM_STORAGE, group_idx=0))

    def stored(self, described):
        self.waiting += described

    def cleared(self):
        self.waiting.append(AllBlocksCleared())

    def take(self):
        waiting, self.waiting = self.waiting, []
        return waiting
