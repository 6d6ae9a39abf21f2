"""A storage backend for SGLang's HiCache (0.5): KV cache on NVMe below its host memory.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "ripieno", "module_path": "ripieno.sglang", "class_name": "RipienoHiCache",
        "path": "/var/lib/kv", "capacity": "100GiB"}'

Pages of all pools (KV, states, windows, indexers) are objects of one store. Each of SGLang's ranks
has a store of its own in the directory, with an equal part of the capacity.

The parameters (hicache-storage-backend-extra-config) are in docs/start/sglang.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

import ripieno
from ripieno import objects
from ripieno.objects import Object, Objects

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
    )
    from sglang.srt.mem_cache.pool_host import HostKVCache

logger = logging.getLogger("sglang.ripieno")

FACTORY = {"backend_name", "module_path", "class_name", "interface_v1"}
"""Parameters that SGLang reads itself."""
PAGES = 16
"""Pages that are copied to or from a pool at once."""


@dataclass(frozen=True)
class Options(objects.Options):
    """Parameters of the backend."""

    engines: int | None = None


def rank_of(config: HiCacheStorageConfig, engines: int | None) -> tuple[int, int]:
    """Returns the number of this process, and how many share the directory."""
    if config.is_mla_model and config.tp_size > 1:
        raise ValueError(
            f"RipienoHiCache: of {config.tp_size} tensor-parallel ranks with latent attention, "
            "SGLang has one store for all, but a store belongs to one process; use "
            "--enable-dp-attention with a --dp-size of all ranks, or another backend"
        )
    number = config.dp_rank
    count = 1
    for rank, size in (
        (config.pp_rank, config.pp_size),
        (config.attn_cp_rank, config.attn_cp_size),
        (config.tp_rank, config.tp_size),
    ):
        number, count = number * size + rank, count * size
    if number >= (engines or count):
        raise ValueError(
            f'RipienoHiCache: this is process {number} of {engines or count}; give "engines", the '
            "number of processes that share the directory"
        )
    return number, engines or count


def _bytes_of(page: torch.Tensor) -> int:
    return int(page.numel() * page.element_size())


class RipienoHiCache(HiCacheStorage):
    """See the module's documentation. SGLang calls it from several threads."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        given = {name: value for name, value in extra.items() if name not in FACTORY}
        self.options = Options.parse(given, "hicache-storage-backend-extra-config")
        self.config = storage_config
        number, count = rank_of(storage_config, self.options.engines)
        self.objects = Objects(self.options, "sglang", logger, number, count)
        self.pools: dict[str, HostKVCache] = {}
        self.known: dict[str, tuple[ripieno.Store, int]] = {}
        """By pool: a handle of its namespace, and bytes of a page."""
        self.lock = threading.Lock()
        """Guards known."""
        logger.info("ripieno: %s: %s", self.objects.path, self.objects.all.counts())

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.pools[PoolName.KV.value] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.pools[str(host_pool_name)] = host_pool

    def _pool(self, name: str) -> tuple[ripieno.Store, int]:
        """Returns a handle of a pool's namespace, and the bytes of its pages."""
        with self.lock:
            if name not in self.known:
                pool, config = self.pools[name], self.config
                size = _bytes_of(pool.get_dummy_flat_data_page())
                weights = json.dumps([config.model_name, self.options.weights_id])
                # Ranks have parts of a page each, in the pool's order.
                layout = [name, type(pool).__name__, getattr(pool, "layout", "")]
                layout += [config.tp_rank, config.tp_size, config.pp_rank, config.pp_size]
                layout += [config.attn_cp_rank, config.attn_cp_size]
                layout += [config.dcp_rank, config.dcp_size]
                tokens = getattr(pool, "page_size", 1)
                namespace = ripieno.Namespace(
                    weights=hashlib.sha256(weights.encode()).digest(),
                    layout="sglang " + json.dumps(layout),
                    dtype=str(getattr(pool, "dtype", "")),
                    block_tokens=tokens,
                    label=f"{config.model_name or ''} {name}"[-64:],
                )
                self.known[name] = self.objects.all.within(namespace), size
            return self.known[name]

    def _found(self, pool: str, key: str, page: torch.Tensor | None = None) -> Object:
        """Returns the object of a page. Without its memory, it is only looked up."""
        space, size = self._pool(pool)
        if page is not None and _bytes_of(page) != size:
            raise ValueError(f"a page of {_bytes_of(page)} bytes was given; {pool} has {size}")
        address = 0 if page is None else page.data_ptr()
        return Object.named(space, [key], size, self.objects.piece, address)

    def _prefix(self, pool: str, keys: Sequence[str]) -> int:
        """Returns how many leading keys are stored."""
        has = self.objects.are_stored([self._found(pool, key) for key in keys])
        return [*has, False].index(False)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._prefix(PoolName.KV.value, keys)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        pages = self._prefix(PoolName.KV.value, keys)
        found = {PoolName.KV: pages} if pages else {}
        lengths = range(1, pages + 1)
        whole = set(lengths)
        for transfer in pool_transfers or ():
            name = str(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                good = set(range(1, self._prefix(name, keys[:pages]) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                has = self.objects.are_stored([self._found(name, key) for key in keys])
                good = {n for n in lengths if all(has[max(0, n - tail) : n])}
            else:
                # Groups of pages beside the KV pool's, which limit no hit: SGLang is told nothing.
                continue
            if good:
                found[transfer.name] = max(good)
            whole &= good
        return PoolTransferResult(max(whole, default=0), found, sorted(whole))

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {each.name: self._move(each, is_store=True) for each in transfers}

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {each.name: self._move(each, is_store=False) for each in transfers}

    def _move(self, transfer: PoolTransfer, is_store: bool) -> list[bool]:
        """Moves pages between a pool and the store. Returns which of them arrived."""
        keys, pool = transfer.keys or [], self.pools[str(transfer.name)]
        size = getattr(pool, "page_size", 1) or 1
        given = transfer.host_indices
        if given is None or given.numel() != len(keys) * size:
            logger.error("ripieno: %s: %d pages have other indices", transfer.name, len(keys))
            return [False] * len(keys)
        indices = given[::size].tolist()
        done: list[bool] = []
        for first in range(0, len(keys), PAGES):
            some, places = keys[first : first + PAGES], indices[first : first + PAGES]
            if is_store:
                pages = [pool.get_data_page(at, flat=True).contiguous() for at in places]
                done += self._set(str(transfer.name), some, pages)
                continue
            pages = [pool.get_dummy_flat_data_page() for _ in some]
            arrived = self._get(str(transfer.name), some, pages)
            for at, page, is_there in zip(places, pages, arrived, strict=True):
                if is_there:
                    pool.set_from_flat_data_page(at, page)
            done += arrived
        return done

    def _set(self, pool: str, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        found = [self._found(pool, key, page) for key, page in zip(keys, pages, strict=True)]
        try:
            if not self.objects.dead:
                self.objects.store(found)
                return self.objects.are_stored(found)
        except ripieno.Error as error:
            self.objects.failed(error)
        return [False] * len(keys)

    def _get(self, pool: str, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        found = [self._found(pool, key, page) for key, page in zip(keys, pages, strict=True)]
        return [False] * len(keys) if self.objects.dead else self.objects.load(found)

    # Of the KV pool alone.

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._move(PoolTransfer(PoolName.KV, host_indices, keys=keys), is_store=True)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._move(PoolTransfer(PoolName.KV, host_indices, keys=keys), is_store=False)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        pages = [each.contiguous() for each in values]
        return all(self._set(PoolName.KV.value, keys, pages))

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        arrived = self._get(PoolName.KV.value, keys, target_locations)
        return [
            page if is_there else None
            for page, is_there in zip(target_locations, arrived, strict=True)
        ]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def exists(self, key: str) -> bool:
        return self._prefix(PoolName.KV.value, [key]) == 1

    def clear(self) -> None:
        """Drops the pages of this rank's pools."""
        try:
            for name in self.pools:
                self._pool(name)[0].clear()
            self.objects.all.sync()
        except ripieno.Error as error:
            self.objects.failed(error)

    def close(self) -> None:
        """Releases the directory."""
        self.objects.close()
