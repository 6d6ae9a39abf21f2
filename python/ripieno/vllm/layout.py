"""Layout of vLLM's KV cache, and checks that it can be stored."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs, group_kernel_blocks
from vllm.v1.kv_cache_layout import KVCacheLayout

import ripieno

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from . import RipienoConnector
    from .options import Options

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")


@dataclass(frozen=True)
class Row:
    """Position of a layer's pages: the page of block b is at offset + b * stride."""

    layer: str
    offset: int
    stride: int
    bytes: int


def rows_of(config: KVCacheConfig) -> list[Row]:
    """Returns the rows of the KV cache, in the order of the layers."""
    specs = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = group.kv_cache_spec
            is_mixed = isinstance(spec, UniformTypeKVCacheSpecs)
            specs[name] = spec.kv_cache_specs[name] if is_mixed else spec
    rows = []
    for tensor in config.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            if not isinstance(specs[name], AttentionSpec):
                raise ValueError(f"layer {name} has {specs[name]}; only attention can be stored")
            offset = tensor.offset + at * tensor.layer_stride
            size = specs[name].unpadded_page_size_bytes
            rows.append(Row(name, offset, tensor.block_stride, size))
    if len({(row.bytes, row.stride) for row in rows}) != 1:
        raise ValueError("the layers' pages have different sizes; they can not be stored together")
    return rows


def tokens_of(config: KVCacheConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """Returns the tokens of a block, over all ranks that share it, and its number of hashes, the
    last of which identifies the block."""
    spec = config.kv_cache_groups[0].kv_cache_spec
    tokens = resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size)
    hashed = config.hash_block_size or tokens
    if tokens % hashed:
        raise ValueError(f"blocks of {tokens} tokens have no whole number of hashes, of {hashed}")
    return tokens, tokens // hashed


def engines_of(parallel: ParallelConfig, options: Options) -> int:
    """Returns the number of engines that share the directory."""
    if options.engines is None and parallel.data_parallel_index >= parallel.data_parallel_size:
        raise ValueError(
            "engines: vLLM does not tell the engines of a dense model how many there are, and this "
            f'is number {parallel.data_parallel_index}; give "engines", the --data-parallel-size'
        )
    size: int = parallel.data_parallel_size
    return options.engines or size


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> bool:
    """Raises ValueError if the KV cache cannot be stored or found again. Returns True to load
    between steps."""
    layout = KVCacheLayout[kv_cache_config.kv_cache_layout]
    if not layout.is_block_compact:
        raise ValueError(f"KV cache layout {layout.name}: a block's page has gaps; use another one")
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        raise ValueError(
            f"the model has {groups} KV cache groups, and one can be stored; "
            "vLLM's tiered offloading with our tier takes it (docs/start/vllm.md)"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("pipeline parallelism: ranks have other layers each; it can not be stored")
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        raise ValueError("prefill context parallelism: nobody has tried it; leave it out")
    if options.layer_times and vllm_config.speculative_config is not None:
        raise ValueError(
            "layer_times: with speculative decoding a step has layers of two models; leave one of "
            "them out"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ValueError(
            f"prefix_caching_hash_algo is {algorithm}: its hashes differ after a restart, and "
            "nothing would be found; use sha256_cbor, or set PYTHONHASHSEED"
        )
    recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    if not (recomputes and vllm_config.use_v2_model_runner):
        return bool(options.load_async)
    if options.load_async is False:
        raise ValueError(
            "load_async is false: vLLM's second model runner can not recompute what failed to load "
            "in a step; leave load_async out, or set VLLM_USE_V2_MODEL_RUNNER=0 or "
            'kv_load_failure_policy "fail"'
        )
    logger.info_once(
        "ripieno: loads between steps: the second model runner can not recompute others"
    )
    return True


def register(
    connector: RipienoConnector, kv_caches: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], ripieno.Pool]:
    """Returns the KV cache as bytes, [block, byte] of each layer, and the pool."""
    config = connector._kv_cache_config
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kv_caches.values()}
    ((base, tensor),) = storages.items() if len(storages) == 1 else [(0, None)]
    if tensor is None or tensor.device.type not in ("cpu", "cuda"):
        where = tensor.device if tensor is not None else f"in {len(storages)} allocations"
        raise ValueError(f"the KV cache is {where}; one allocation, on CPU or GPU, can be stored")
    pages = []
    for row in connector.rows:
        cache = group_kernel_blocks(kv_caches[row.layer], config.num_blocks)
        found = cache.data_ptr() - base, cache.stride(0) * cache.element_size()
        if found != (row.offset, row.stride):
            raise ValueError(
                f"layer {row.layer} is at offset {found[0]} with stride {found[1]}; vLLM promised "
                f"{row.offset} and {row.stride}"
            )
        page = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        size, stride = (config.num_blocks, row.bytes), (row.stride, 1)
        pages.append(page.set_(tensor.untyped_storage(), row.offset, size, stride))
    pool = ripieno.Pool(
        address=base,
        length=tensor.untyped_storage().nbytes(),
        rows=[row.offset for row in connector.rows],
        block_stride=connector.rows[0].stride,
        blocks=config.num_blocks,
        owner=tensor,
        device=str(tensor.device),
    )
    return pages, pool
