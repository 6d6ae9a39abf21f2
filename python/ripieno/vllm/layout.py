"""Layout of vLLM's KV cache, and checks that it can be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    group_kernel_blocks,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import ripieno

from .groups import check_groups, is_recurrent

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from . import RipienoConnector
    from .options import Options

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")


ROW_BYTES = 1 << 20
"""Maximum bytes of a row of a hybrid model's block, of which all rows are loaded at once."""
SHARED_ROW_BYTES = 1 << 18
"""Maximum bytes of a row of another block in which layers' pages have different sizes: a layer
waits for the rows that it has a part of."""
FIRST = ""
"""In Layout.layers: the layers that a step may compute before its first hook."""


@dataclass(frozen=True)
class Layout:
    """Position of pages in the KV cache: that of block b is at its offset + b * stride.

    The groups of a hybrid model use the same memory: a block belongs to one of them, and its pages
    are those of that group's layers.
    """

    offsets: dict[str, int]
    """Of each layer's page."""
    stride: int
    rows: list[int]
    """Offsets of the rows, into which a block is divided. They have the same size, and the order
    in which layers need them."""
    page: int
    """Bytes of a block in a row."""
    layers: dict[str, int]
    """The last row that is loaded before each layer is computed; empty if all are."""
    computed: dict[str, int]
    """The row of each layer; empty if a row has more than one layer of a group."""


def layout_of(config: KVCacheConfig) -> Layout:
    """Returns the layout of the KV cache. Raises ValueError if a block has no rows of one size.

    It depends on vLLM's tensors only: the scheduler does not know the specs of all layers.
    """
    offsets, sizes = {}, set()
    for tensor in config.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            offsets[name] = tensor.offset + at * tensor.layer_stride
        # Pages of a layer follow each other, or the pages of a block do.
        sizes.add(min(tensor.layer_stride, tensor.block_stride))
    strides = {tensor.block_stride for tensor in config.kv_cache_tensors}
    stride, rows = max(strides), sorted(set(offsets.values()))
    is_packed = KVCacheLayout[config.kv_cache_layout].is_block_outermost
    if len(strides) > 1 and not is_packed:
        raise ValueError(
            "the layers' pages have different sizes, and a block is not one piece of memory in "
            f"layout {config.kv_cache_layout}"
        )
    if not is_packed or (len(config.kv_cache_groups) == 1 and len(sizes) == 1):
        layers = {name: rows.index(offset) for name, offset in offsets.items()}
        return Layout(offsets, stride, rows, max(sizes), layers, layers)
    # A block is one piece of memory, with all layers of a group. Rows are pieces of it, of whole
    # dwords.
    is_hybrid = len(config.kv_cache_groups) > 1
    count = -(-stride // (ROW_BYTES if is_hybrid else SHARED_ROW_BYTES))
    while stride % (count * 4):
        count += 1
    page = stride // count
    order, layers = (range(count), {}) if is_hybrid else in_order(config, page)
    return Layout(offsets, stride, [row * page for row in order], page, layers, {})


def unwritten(config: KVCacheConfig, layout: Layout) -> list[list[tuple[int, int, int]]]:
    """Returns by group the parts of a block that none of its layers writes: row, and the first and
    last byte in it. A group may have fewer layers than others, and smaller pages."""
    pages = {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for name in tensor.layers
    }
    found = []
    for group in config.kv_cache_groups:
        written = []
        for name in group.layer_names:
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            spec = specs.get(name, group.kv_cache_spec)
            # States are at the begin of a page.
            size = spec.state_content_size_bytes if isinstance(spec, MambaSpec) else pages[name]
            written.append((layout.offsets[name], layout.offsets[name] + size))
        written.sort()
        parts = []
        for row, first in enumerate(layout.rows):
            at, last = first, first + layout.page
            for begin, end in written:
                if begin < last and end > at:
                    parts += [(row, at - first, begin - first)] if begin > at else []
                    at = end
            parts += [(row, at - first, layout.page)] if at < last else []
        found.append(parts)
    return found


def in_order(config: KVCacheConfig, page: int) -> tuple[Sequence[int], dict[str, int]]:
    """Returns a block's rows in the order in which layers need them, and the last one, by that
    order, that is loaded before each layer is computed.

    vLLM calls a hook for a layer's attention, but none for its indexer, which is computed between
    the hooks of the layer before and of its own: a hook waits for the next layer as well.
    """
    needs: dict[str, dict[int, None]] = {}
    for tensor in config.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            first = tensor.offset + at * tensor.layer_stride
            needs[name] = dict.fromkeys(range(first // page, -(-(first + tensor.layer_stride) // page)))
    # As in "model.layers.7.self_attn.indexer.k_cache".
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in needs}
    order: dict[int, None] = {}
    last = []
    for _, names in groupby(sorted(needs, key=numbers.__getitem__), numbers.__getitem__):
        together = list(names)
        for name in together:
            order |= needs[name]
        last.append((together, len(order) - 1))
    layers = {FIRST: last[0][1]}
    for (together, _), (_, row) in zip(last, [*last[1:], last[-1]], strict=True):
        layers |= dict.fromkeys(together, row)
    return list(order), layers


def required_layout(vllm_config: VllmConfig) -> str | None:
    """Returns the layout in which a block is one piece of memory for a model whose configuration
    tells that its layers' pages have different sizes: an indexer's beside those of latents, a
    draft's, or layers that are not quantised. None for others, whose layers are loaded one by one
    in any layout."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    is_mixed = hasattr(model.hf_text_config, "index_topk") or bool(skipped(vllm_config))
    if draft:
        ranks = (vllm_config.parallel_config, speculative.draft_parallel_config)
        heads = [each.get_num_kv_heads(n) for each, n in zip((model, draft), ranks, strict=True)]
        is_mixed |= heads[0] != heads[1] or model.get_head_size() != draft.get_head_size()
    return KVCacheLayout.BLHNC.name if is_mixed else None


def skipped(vllm_config: VllmConfig) -> list[str]:
    """Returns the layers that a quantised KV cache leaves in the model's type. vLLM adds some to
    those that were given."""
    cache = vllm_config.cache_config
    return cache.kv_cache_dtype_skip_layers if cache.cache_dtype != "auto" else []


def layout_for(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Layout:
    """Same as layout_of, and the error says what to do."""
    try:
        return layout_of(kv_cache_config)
    except ValueError as error:
        dtype, layers = vllm_config.cache_config.cache_dtype, ", ".join(skipped(vllm_config))
        # The layout was asked for already where the configuration tells of the sizes.
        hint = "set VLLM_KV_CACHE_LAYOUT=BLHNC, if vLLM's attention backend has that layout"
        if layers:
            hint = (
                f"with --kv-cache-dtype {dtype} vLLM leaves layers {layers} in the model's type, and "
                "its attention backend has no other layout; use --kv-cache-dtype fp8, or auto"
            )
        elif vllm_config.speculative_config is not None:
            hint += ", or leave the draft model out"
        raise ValueError(f"{error}; {hint}") from None


def engines_of(parallel: ParallelConfig, options: Options) -> int:
    """Returns the number of engines that share the directory."""
    if options.engines is None and parallel.data_parallel_index >= parallel.data_parallel_size:
        raise ValueError(
            "engines: vLLM does not tell the engines of a dense model how many there are, and this "
            f'is number {parallel.data_parallel_index}; give "engines", the --data-parallel-size'
        )
    size: int = parallel.data_parallel_size
    return options.engines or size


def copies_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> int:
    """Returns how many successive ranks have the same KV cache, which the first of them stores for
    all: those of tensor parallelism, if all layers have latents (MLA). Raises ValueError if
    scheduler and workers might disagree."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    ranks: int = parallel.tensor_parallel_size
    # Ranks of context parallelism have other tokens each, and a drive belongs to one process.
    if ranks == 1 or parallel.decode_context_parallel_size > 1 or options.has_drives:
        return 1
    draft = speculative and speculative.draft_model_config
    if not all(model.use_mla for model in (vllm_config.model_config, draft) if model):
        return 1
    kinds = [
        {isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) for spec in iter_layer_specs(each)}
        for each in (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    ]
    if any(len(kind) > 1 for kind in kinds):
        # The scheduler knows one layer of a group.
        raise ValueError(
            "a KV cache group has layers of latents, which all ranks have, and others, of which each "
            "has a part; use --tensor-parallel-size 1, or serve this model without the connector"
        )
    return ranks if kinds == [{True}] * len(kinds) else 1


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options) -> bool:
    """Raises ValueError if the KV cache cannot be stored or found again. Returns True to load
    between steps."""
    layout = KVCacheLayout[kv_cache_config.kv_cache_layout]
    if not layout.is_block_compact:
        raise ValueError(f"KV cache layout {layout.name}: a block's page has gaps; use another one")
    check_groups(kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    if options.store.get("codec", "none") != "none":
        check_codec(groups, vllm_config.device_config.device_type)
    is_hybrid = len(groups) > 1 or is_recurrent(groups[0])
    if is_hybrid and not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "the model has several KV cache groups: what vLLM keeps in its own prefix cache is "
            "stored; use --enable-prefix-caching"
        )
    if any(is_recurrent(group) for group in groups) and vllm_config.speculative_config is not None:
        raise ValueError(
            "speculative decoding changes the states of state-space layers after a step, when they "
            "are already being stored; leave it out"
        )
    if vllm_config.model_config.enable_sleep_mode:
        check_sleep(options)
    check_pipeline(vllm_config)
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        raise ValueError("prefill context parallelism: nobody has tried it; leave it out")
    if options.layer_times and vllm_config.speculative_config is not None:
        raise ValueError(
            "layer_times: with speculative decoding a step has layers of two models; leave one of "
            "them out"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    # Also with a fixed seed: who can choose a prompt can choose one with the hash of another.
    if not algorithm.startswith("sha256"):
        raise ValueError(
            f"prefix_caching_hash_algo is {algorithm}: prompts with the same hash can be made, and "
            "a store outlives the engine and may have several users; use sha256 or sha256_cbor"
        )
    if is_hybrid:
        if options.load_async is False:
            raise ValueError(
                "load_async is false: vLLM can not recover from a load that fails in a step if a "
                "model has several KV cache groups; leave load_async out"
            )
        return True
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


def check_sleep(options: Options) -> None:
    """Raises ValueError if vLLM does not say that it takes the KV cache's memory away."""
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        raise ValueError(
            "sleep mode takes the KV cache's memory away, of which vLLM 0.32 tells no connector, and "
            "transfers may be in flight; leave --enable-sleep-mode out, or use vLLM 0.33"
        )
    logger.info_once(
        "ripieno: sleep mode: what is stored is %s when vLLM falls asleep (keep_on_reset)",
        "kept, also if the weights change" if options.keep_on_reset else "dropped",
    )


def check_codec(groups: Sequence[KVCacheGroupSpec], device: str) -> None:
    """Raises ValueError if blocks do not consist of bf16, for which the codec is, or are on a
    GPU."""
    if device != "cpu":
        raise ValueError(f"codec: the CPU encodes, and the KV cache is on {device}; leave codec out")
    kinds = {getattr(group.kv_cache_spec, "dtype", None) for group in groups}
    if kinds != {torch.bfloat16}:
        found = ", ".join(sorted(str(kind) for kind in kinds))
        raise ValueError(
            f"codec: it is for a KV cache of torch.bfloat16, and this one has {found}; leave codec "
            "out"
        )


def check_pipeline(vllm_config: VllmConfig) -> None:
    """Raises ValueError if ranks of a pipeline have different numbers of layers: all ranks have
    files of the same size."""
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    parts = [get_pp_indices(layers, rank, ranks) for rank in range(ranks)]
    counts = [end - begin for begin, end in parts]
    if len(set(counts)) > 1:
        raise ValueError(
            f"pipeline parallelism: the ranks have {counts} layers each, and only equal numbers "
            f"can be stored; divide {layers} by another --pipeline-parallel-size, or use "
            "--tensor-parallel-size"
        )
    if ranks > 1 and vllm_config.speculative_config is not None:
        raise ValueError(
            "pipeline parallelism with speculative decoding: the last rank has the draft model's "
            "layers, too, and only equal numbers can be stored; leave one of them out"
        )


def register(
    connector: RipienoConnector, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]
) -> tuple[list[torch.Tensor], ripieno.Pool]:
    """Returns the KV cache as bytes, [block, byte] of each row, and the pool."""
    config = connector._kv_cache_config
    # A state-space layer has several tensors, one behind the other in each page.
    caches = {
        name: each if isinstance(each, torch.Tensor) else each[0]
        for name, each in kv_caches.items()
    }
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in caches.values()}
    ((base, tensor),) = storages.items() if len(storages) == 1 else [(0, None)]
    if tensor is None or tensor.device.type not in ("cpu", "cuda"):
        where = tensor.device if tensor is not None else f"in {len(storages)} allocations"
        raise ValueError(f"the KV cache is {where}; one allocation, on CPU or GPU, can be stored")
    layout = connector.layout
    for name, offset in layout.offsets.items():
        cache = group_kernel_blocks(caches[name], config.num_blocks)
        found = cache.data_ptr() - base, cache.stride(0) * cache.element_size()
        if found != (offset, layout.stride):
            raise ValueError(
                f"layer {name} is at offset {found[0]} with stride {found[1]}; vLLM promised "
                f"{offset} and {layout.stride}"
            )
    pages = []
    for offset in layout.rows:
        page = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        size, stride = (config.num_blocks, layout.page), (layout.stride, 1)
        pages.append(page.set_(tensor.untyped_storage(), offset, size, stride))
    pool = ripieno.Pool(
        address=base,
        length=tensor.untyped_storage().nbytes(),
        rows=layout.rows,
        block_stride=layout.stride,
        blocks=config.num_blocks,
        owner=tensor,
        device=str(tensor.device),
    )
    return pages, pool
