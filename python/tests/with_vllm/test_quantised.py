"""Quantised KV caches: each of vLLM's types is stored with the right bytes, or refused.

The specs of the layers are made by vLLM's own attention backends. vLLM's CPU backend has FP8 only.
"""

import importlib
import multiprocessing
import sys
import types
import typing
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm")

import ripieno  # noqa: E402
import torch  # noqa: E402
from forked import live  # noqa: E402
from prompts import PROMPTS, tokens_of  # noqa: E402
from ripieno.vllm.groups import Groups  # noqa: E402
from ripieno.vllm.layout import layout_for, register, required_layout  # noqa: E402
from test_layouts import config_of, views  # noqa: E402
from vllm.config.cache import CacheDType  # noqa: E402
from vllm.model_executor.layers.attention import Attention, MLAAttention  # noqa: E402
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

PLACE = "vllm.v1.attention.backends"
TRITON, FLASHINFER = "triton_attn.TritonAttentionBackend", "flashinfer.FlashInferBackend"
TURBOQUANT = "turboquant_attn.TurboQuantAttentionBackend"
SPARSE = "mla.flashmla_sparse.FlashMLASparseBackend"
HEADS, HEAD, BLOCK, LAYERS = 8, 128, 64, 8
BACKENDS = {
    "auto": (TRITON, 512),
    "float16": (TRITON, 512),
    "bfloat16": (TRITON, 512),
    "fp8": (TRITON, 256),
    "fp8_e4m3": (TRITON, 256),
    "fp8_e5m2": (TRITON, 256),
    "fp8_inc": (TRITON, 256),
    # With a scale of 4 bytes for each of K and V.
    "int8_per_token_head": (TRITON, 256 + 8),
    "fp8_per_token_head": (TRITON, 256 + 8),
    "int4_per_token_head": (TRITON, 128 + 8),
    # With a scale of a byte for each 16 values.
    "nvfp4": (FLASHINFER, 128 + 16),
    "nvfp4_4over6": (FLASHINFER, 128 + 16),
    "turboquant_k8v4": (TURBOQUANT, None),
    "turboquant_4bit_nc": (TURBOQUANT, None),
    "turboquant_k3v4_nc": (TURBOQUANT, None),
    "turboquant_3bit_nc": (TURBOQUANT, None),
    "ultraquant_4bit": ("ultraquant_attn.UltraQuantAttentionBackend", None),
    # Latents, of 576 values.
    "fp8_ds_mla": (SPARSE, 656),
    "nvfp4_ds_mla": (SPARSE, 352),
}
"""By type: the backend, and the bytes of a token and head, where it is known without vLLM."""


class Anything:
    """Finds modules of a GPU's kernels, which are not called."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("flashinfer") else None

    def create_module(self, spec):
        made = MagicMock(name=spec.name)
        made.__spec__, made.__path__ = spec, []
        return made

    def exec_module(self, module):
        """It is complete."""


def made(dtype):
    """Returns the spec of a layer, and the layouts of its backend."""
    from vllm.triton_utils import tl

    sys.meta_path.append(Anything())
    type(tl).__getattr__ = lambda self, name: MagicMock()
    module, name = BACKENDS[dtype][0].rsplit(".", 1)
    backend = getattr(importlib.import_module(f"{PLACE}.{module}"), name)
    element = torch.bfloat16 if dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[dtype]
    of = types.SimpleNamespace
    config = of(cache_config=of(block_size=BLOCK), model_config=of(dtype=torch.bfloat16))
    layer = of(kv_cache_dtype=dtype, kv_cache_torch_dtype=element, sliding_window=None)
    # Of 0.33.
    layer.topk_buffer_width = None
    if dtype.endswith("ds_mla"):
        layer.indexer, layer.non_causal_multi_token_decode, layer.head_size = None, False, 576
        spec = MLAAttention.get_kv_cache_spec(layer, config)
    else:
        layer.attn_type, layer.num_kv_heads = AttentionType.DECODER, HEADS
        layer.head_size = layer.head_size_v = HEAD
        spec = Attention.get_kv_cache_spec(layer, config)
    layouts = backend.supported_kv_cache_layouts() or KVCacheLayout
    return backend.customize_spec(spec), [layout.name for layout in layouts]


@pytest.fixture(scope="module")
def specs():
    """By type: the spec and the layouts, made in a process of their own, as modules are changed."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return {dtype: pool.apply(made, (dtype,)) for dtype in BACKENDS}


def configured(dtype, skipped):
    of = types.SimpleNamespace
    return of(
        cache_config=of(cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped),
        model_config=of(hf_text_config=of()),
        speculative_config=None,
    )


def test_all_types_are_known():
    # 0.33 has three more, for AMD's GPUs.
    known = {each for each in typing.get_args(CacheDType) if not each.startswith("octave")}
    assert known == set(BACKENDS)


@pytest.mark.parametrize("skips", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("dtype", BACKENDS)
def test_a_quantised_cache_comes_back(specs, dtype, skips, tmp_path):
    spec, layouts = specs[dtype]
    is_latent = isinstance(spec, MLAAttentionSpec)
    heads, size = 1 if is_latent else HEADS, BACKENDS[dtype][1]
    assert size is None or spec.page_size_bytes == BLOCK * heads * size
    plain, _ = specs["auto"]
    if is_latent:
        plain = MLAAttentionSpec(BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    # As TurboQuant does by itself.
    skipped = [0, 1, LAYERS - 2, LAYERS - 1] if skips and dtype != "auto" else []
    layers = [plain if at in skipped else spec for at in range(LAYERS)]
    config = configured(dtype, [str(at) for at in skipped])
    wanted = required_layout(config)
    assert wanted == ("BLHNC" if skipped else None)
    made = config_of(layers, wanted if wanted in layouts else layouts[0])
    if skipped and wanted not in layouts and plain.page_size_bytes != spec.page_size_bytes:
        with pytest.raises(ValueError, match=f"{dtype} vLLM leaves layers 0, 1, 6, 7 in .* fp8"):
            layout_for(config, made)
        return
    check_bytes(made, layout_for(config, made), tmp_path)


def check_bytes(config, layout, path):
    """Stores blocks of a KV cache, and loads them into other blocks."""
    memory = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    caches = views(config, memory)
    connector = types.SimpleNamespace(layout=layout, _kv_cache_config=config)
    pages, pool = register(connector, caches)
    tokens = Groups(config, types.SimpleNamespace(decode_context_parallel_size=1)).tokens
    shape = ripieno.Shape(len(layout.rows), 1, layout.page, tokens)
    memory.random_(-128, 128)
    # All bytes of the layers, and no others.
    (group,) = config.kv_cache_groups
    assert layout.page * len(layout.rows) == group.kv_cache_spec.page_size_bytes * (
        1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names)
    )
    with ripieno.Store(path / "store", shape, pool, capacity="64MiB") as store:
        before = {name: bytes_of(cache, 3) for name, cache in caches.items()}
        with store.store([b"k" * 32], [3]) as request:
            request.move_all()
            request.commit()
        memory.zero_()
        with store.load([b"k" * 32], [5]) as request:
            request.move_all()
        assert {name: bytes_of(cache, 5) for name, cache in caches.items()} == before
        assert not any(any(bytes_of(cache, 4)) for cache in caches.values())


def bytes_of(cache, block):
    return cache[block].contiguous().view(torch.uint8).numpy().tobytes()


def test_fp8_in_vllm(model, options):
    """Answers of a cache in FP8, and the same from a store."""
    dtype = {"model": model, "kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    said, _ = live(tokens_of, **dtype)
    assert live(tokens_of, options=options, **dtype)[0] == said
    again, cached = live(tokens_of, options=options, **dtype)
    assert again == said and all(cached[: len(PROMPTS) - 1])
