"""KV cache groups: the blocks of a request that a hit needs, that are stored, and their keys.

In one group of attention layers, a hit is a prefix. A hybrid model has several groups (or one of
state-space layers) that share a pool of blocks: a sliding window needs only the blocks of its
window, and a state-space layer the state at the hit's end. vLLM's own managers decide how long a
hit is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_dcp_kv_block_size,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    iter_layer_specs,
)

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    import ripieno

Places = range | list[tuple[int, int]]
"""Blocks of a request: a range in the only group, or group and position of each."""


def is_recurrent(group: KVCacheGroupSpec) -> bool:
    """Returns True if the group has layers with a state instead of a KV cache for each token."""
    return any(isinstance(spec, MambaSpec) for spec in iter_layer_specs(group.kv_cache_spec))


class Groups:
    """The KV cache groups of a model."""

    def __init__(self, config: KVCacheConfig, parallel: ParallelConfig) -> None:
        groups = config.kv_cache_groups
        dcp = parallel.decode_context_parallel_size
        self.sizes = [resolve_dcp_kv_block_size(group.kv_cache_spec, dcp) for group in groups]
        """Tokens of a block in each group, over all ranks that share it."""
        self.tokens = math.lcm(*self.sizes)
        """A hit is a multiple of this many tokens, called a unit."""
        hashed = config.hash_block_size or self.sizes[0]
        if bad := [size for size in self.sizes if size % hashed]:
            raise ValueError(
                f"blocks of {bad[0]} tokens have no whole number of hashes, of {hashed}"
            )
        self.hashes = [size // hashed for size in self.sizes]
        """Hashes of a block in each group; the last one identifies the block."""
        self.blocks = [self.tokens // size for size in self.sizes]
        """Blocks of a unit in each group."""
        self.kinds = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in (group.kv_cache_spec for group in groups)
        ]
        """Kind and window of each group, for events."""
        self.unit_hashes = self.tokens // hashed
        self.is_hybrid = len(groups) > 1 or is_recurrent(groups[0])

    def hash(self, request: Request, group: int, at: int) -> BlockHash:
        """Returns vLLM's hash of a block."""
        found: BlockHash = request.block_hashes[(at + 1) * self.hashes[group] - 1]
        return found

    def hashes_of(self, request: Request, group: int, first: int, last: int) -> list[bytes]:
        """Returns vLLM's hashes of a range of blocks. A slice: there may be thousands."""
        every = self.hashes[group]
        found: list[bytes] = request.block_hashes[(first + 1) * every - 1 : last * every : every]
        return found

    @staticmethod
    def key(hash: bytes, group: int) -> bytes:
        """Returns the key of a block in one of several groups."""
        return hash[:31] + bytes((group,))

    def keys(self, request: Request, places: Places) -> Sequence[bytes]:
        """Returns the keys of blocks: their hashes, and with several groups the group in the last
        byte."""
        if not isinstance(places, range):
            return [self.key(self.hash(request, group, at), group) for group, at in places]
        return self.hashes_of(request, 0, places.start, places.stop)

    def blocks_of(self, ids: Sequence[list[int]], places: Places) -> list[int]:
        """Returns vLLM's numbers of blocks. ids: those of the request's blocks in each group."""
        if isinstance(places, range):
            return ids[0][places.start : places.stop]
        return [ids[group][at] for group, at in places]

    def kept(
        self, request: Request, ids: Sequence[Sequence[int]], last: int, pool: BlockPool
    ) -> Places:
        """Returns the blocks of a request's first `last` units that a hit may need, in the order of
        their last tokens: those that vLLM keeps in its own cache, if there are several groups.

        ids: the request's blocks in each group.
        """
        if not self.is_hybrid:
            return range(last)
        found = []
        for group, blocks in enumerate(ids):
            tokens, suffix = self.sizes[group], make_block_hash_with_group_id(BlockHash(b""), group)
            hashes = self.hashes_of(request, group, 0, last * self.blocks[group])
            for at, (block, hash) in enumerate(zip(blocks, hashes, strict=False)):
                # Null blocks, and those that vLLM does not keep, have no hash.
                if block and pool.blocks[block].block_hash == hash + suffix:
                    found.append(((at + 1) * tokens, group, at))
        found.sort()
        return [(group, at) for _, group, at in found]

    def chosen(self, places: Places, positions: list[int]) -> list[tuple[int, int]]:
        """Returns the blocks at some positions."""
        if isinstance(places, range):
            return [(0, places[at]) for at in positions]
        return [places[at] for at in positions]

    def runs(self, places: Places) -> list[tuple[int, range]]:
        """Returns the group and the positions of each run of consecutive blocks."""
        if isinstance(places, range):
            return [(0, places)] if places else []
        found: list[tuple[int, range]] = []
        for group, at in sorted(places):
            if found and found[-1][0] == group and found[-1][1].stop == at:
                found[-1] = group, range(found[-1][1].start, at + 1)
            else:
                found.append((group, range(at, at + 1)))
        return found

    def number_before(self, places: Places, unit: int) -> int:
        """Returns how many of the blocks, in the order of their tokens, are before a unit."""
        if isinstance(places, range):
            return unit - places.start
        return sum(at < unit * self.blocks[group] for group, at in places)


class Lookup:
    """Finds hits in a catalog. In a hybrid model, by vLLM's own prefix cache lookup, for which it
    takes the place of vLLM's BlockPool."""

    def __init__(
        self,
        groups: Groups,
        manager: KVCacheManager,
        catalog: ripieno.Catalog | ripieno.ServedCatalog,
    ) -> None:
        self.groups, self.catalog = groups, catalog
        self.hash_block_size: int = manager.block_pool.hash_block_size
        self.null_block = manager.block_pool.null_block
        self.found_block = KVCacheBlock(block_id=1)
        self.found: list[set[bytes]] = [set() for _ in groups.sizes]
        """Hashes of the blocks that were found in each group."""
        self.coordinator = self._over(manager.coordinator)
        self.drops_last: bool = self.coordinator.single_type_managers[0].use_eagle
        """In the only group: a draft's last token of a block depends on the next one, so that a
        hit is a block shorter, as in vLLM's own cache."""

    def _over(self, coordinator: KVCacheCoordinator) -> Any:
        """Returns a coordinator that looks blocks up here."""
        mine: Any = copy.copy(coordinator)
        managers = tuple(copy.copy(each) for each in coordinator.single_type_managers)
        for manager in managers:
            manager.block_pool = self
        mine.single_type_managers, mine.block_pool = managers, self
        # Only whole blocks are stored.
        mine.enable_partial_hash_hits = False
        return mine

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """Called by vLLM's managers, as BlockPool's."""
        if all(block_hash in self.found[group] for group in kv_cache_group_ids):
            return [self.found_block] * len(kv_cache_group_ids)
        return None

    def hit(self, request: Request, first: int, space: int) -> tuple[int, Places]:
        """Returns the end of the longest hit, in units, and its blocks to be loaded if vLLM has the
        first units by itself."""
        groups = self.groups
        # vLLM must compute at least one token.
        tokens = request.num_tokens - 1
        if not groups.is_hybrid:
            keys = groups.keys(request, range(first, tokens // groups.tokens))
            found = self.catalog.lookup(space, keys)
            last = first + max(0, found - self.drops_last)
            return last, range(first, last)
        for group, each in enumerate(groups.hashes):
            own, end = first * groups.blocks[group], len(request.block_hashes) // each
            hashes = groups.hashes_of(request, group, 0, end)
            keys = [groups.key(hash, group) for hash in hashes[own:]]
            flags = self.catalog.are_stored(space, keys)
            # A hit that is longer than vLLM's own needs no more of the blocks before than vLLM's.
            self.found[group] = {*hashes[:own], *compress(hashes[own:], flags)}
        blocks, tokens, more = self.coordinator.find_longest_cache_hit(request.block_hashes, tokens)
        if more:
            # Where another request's prefix ends, windows and states are missing. vLLM keeps them
            # this time, as it does for prefixes in its own cache, and so they are stored.
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens + more)
        last = max(first, tokens // groups.tokens)
        wanted = [
            (group, at)
            for group, found in enumerate(blocks)
            for at in range(first * groups.blocks[group], last * groups.blocks[group])
            if at < len(found) and found[at] is not self.null_block
        ]
        return last, wanted


def check_groups(config: KVCacheConfig) -> None:
    """Raises ValueError if a group's blocks cannot be found again by their hashes."""
    for group in config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            is_cached = isinstance(spec, AttentionSpec | MambaSpec) and spec.prefix_cacheable
            if not is_cached or isinstance(spec, CrossAttentionSpec):
                raise ValueError(
                    f"layer {group.layer_names[0]} has {type(spec).__name__}, whose blocks vLLM "
                    "does not find by their tokens: serve this model without the connector"
                )
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
                raise ValueError(
                    f"layer {group.layer_names[0]} keeps no states (mamba_cache_mode is none); use "
                    "--enable-prefix-caching and --mamba-cache-mode align"
                )
        if group.host_resident or not group.enable_kv_transfer:
            raise ValueError(f"layer {group.layer_names[0]} is not in the KV cache of the GPU")
