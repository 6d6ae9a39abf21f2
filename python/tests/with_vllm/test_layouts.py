"""Layouts of the KV cache, by vLLM's own grouping of real layers, with bytes through a store.

vLLM's CPU backend runs none of these models.
"""

import types

import pytest

pytest.importorskip("vllm")

import ripieno  # noqa: E402
import torch  # noqa: E402
from ripieno.vllm.groups import Groups  # noqa: E402
from ripieno.vllm.layout import layout_of, register  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

try:
    from vllm.v1.core import kv_cache_planning as vllm_groups
except ImportError:
    # vLLM 0.32.
    from vllm.v1.core import kv_cache_utils as vllm_groups

BLOCKS = 9


def attention(heads=8, window=None, size=64):
    shape = {"block_size": size, "num_kv_heads": heads, "head_size": 128, "dtype": torch.bfloat16}
    if window:
        return SlidingWindowSpec(sliding_window=window, **shape)
    return FullAttentionSpec(**shape)


def latent(bytes):
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=bytes, dtype=torch.uint8)


def state(page):
    return MambaSpec(
        block_size=64,
        shapes=((3, 1024), (12, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


PAGE = 2 * 64 * 8 * 128 * 2
"""Bytes of a page of 8 heads."""

MODELS = {
    "an indexer beside latents (DeepSeek V3.2, GLM-5)": [latent(656), latent(132)] * 3,
    "a draft with fewer heads (EAGLE-3)": [attention()] * 4 + [attention(heads=2)],
    "sliding windows (Gemma 3)": [attention(window=512)] * 5 + [attention()],
    "states (Qwen3-Next)": [state(PAGE)] * 3 + [attention()],
}


def config_of(specs, layout):
    """Returns vLLM's configuration of a KV cache of these layers."""
    of = types.SimpleNamespace
    cache = of(num_gpu_blocks_override=BLOCKS, prefix_cache_retention_interval=0)
    cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout[layout]
    config = of(
        cache_config=cache,
        attention_config=of(hisparse_config=None),
        scheduler_config=of(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )
    layers = {f"model.layers.{at}.attn": spec for at, spec in enumerate(specs)}
    groups = vllm_groups.get_kv_cache_groups(config, layers)
    made = vllm_groups.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    made.kv_cache_layout = layout
    return made


def views(config, memory):
    """Returns each layer's KV cache, as vLLM's workers make it."""
    found, specs = {}, {}
    for group in config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs |= {name: inner.get(name, group.kv_cache_spec) for name in group.layer_names}
    for tensor in config.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        layout = KVCacheLayout[config.kv_cache_layout]
        made = create_kv_cache_views(memory, spec, config.num_blocks, layout, tensor)
        found |= dict(zip(tensor.layers, made, strict=True))
    return found


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_all_layers_come_back(model, layout, tmp_path):
    config = config_of(MODELS[model], layout)
    is_mixed = len(config.kv_cache_groups) == 1
    if is_mixed and layout == "LBHNC":
        with pytest.raises(ValueError, match="set VLLM_KV_CACHE_LAYOUT=BLHNC"):
            layout_of(config)
        return
    memory = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    caches = views(config, memory)
    found = layout_of(config)
    connector = types.SimpleNamespace(layout=found, _kv_cache_config=config)
    pages, pool = register(connector, caches)
    assert len(pages) == len(found.rows)
    tokens = Groups(config, types.SimpleNamespace(decode_context_parallel_size=1)).tokens
    shape = ripieno.Shape(len(found.rows), 1, found.page, tokens)
    memory.random_(-128, 128)
    with ripieno.Store(tmp_path / "store", shape, pool, capacity="64MiB") as store:
        # As bytes: some are no numbers.
        caches = {name: cache.view(torch.uint8) for name, cache in caches.items()}
        before = {name: cache.clone() for name, cache in caches.items()}
        keys = [bytes([at]) * 32 for at in range(4)]
        with store.store(keys, [1, 2, 3, 4]) as request:
            request.move_all()
            request.commit()
        memory.zero_()
        with store.load(keys, [5, 8, 6, 7]) as request:
            request.move_all()
        for name, cache in caches.items():
            for source, target in zip([1, 2, 3, 4], [5, 8, 6, 7], strict=True):
                assert torch.equal(cache[target], before[name][source]), name
            for other in (0, 1, 2, 3, 4):
                assert not cache[other].any(), "another block was changed"
