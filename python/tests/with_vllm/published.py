"""KV caches of published models: the specs of their layers, as vLLM makes them on one GPU.

Shapes are those of the models' configurations, written down from memory; shapes and types of states
are computed by vLLM. The order of layers does not matter, and of a model that is refused not their
number.
"""

from dataclasses import dataclass, field

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as Types
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as States
from vllm.model_executor.models.config import NemotronHForCausalLMConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

HALF, SINGLE, BYTE = torch.bfloat16, torch.float32, torch.uint8
BLOCK = 16
"""Tokens of a block on a GPU by default; vLLM takes 64 for MLA."""


@dataclass
class Model:
    """A model. text: what its configuration says beside the shapes; draft: heads of its draft."""

    layers: list
    text: dict = field(default_factory=dict)
    layouts: tuple = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
    """Those that its attention backends have, preferred ones first."""
    draft: int | None = None


def full(heads, head, size=BLOCK):
    shape = {"num_kv_heads": heads, "head_size": head, "dtype": HALF}
    return FullAttentionSpec(block_size=size, **shape)


def window(tokens, heads, head):
    shape = {"num_kv_heads": heads, "head_size": head, "dtype": HALF}
    return SlidingWindowSpec(block_size=BLOCK, sliding_window=tokens, **shape)


def chunked(tokens, heads, head):
    shape = {"num_kv_heads": heads, "head_size": head, "dtype": HALF}
    return ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=tokens, **shape)


def latent(head=576, dtype=HALF, size=64, **more):
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": head, "dtype": dtype}
    return MLAAttentionSpec(**shape | more)


def cross(heads, head):
    shape = {"num_kv_heads": heads, "head_size": head, "dtype": HALF}
    return CrossAttentionSpec(block_size=BLOCK, **shape)


def indexed(layers, dtype=HALF):
    """Latents, and an indexer's 132 bytes."""
    return Model([latent(dtype=dtype), latent(132, BYTE)] * layers, {"index_topk": 2048})


def hybrid(pattern, attention, shapes, dtypes, least=BLOCK):
    """Layers by a pattern of A (attention), S (state) and B (both). vLLM makes the attention's
    blocks as large as a state needs, and pads the state."""
    kinds = {"block_size": 1, "mamba_cache_mode": "align", "shapes": shapes, "dtypes": dtypes}
    state = MambaSpec(**kinds).page_size_bytes
    size = least * -(-state // (least * attention(1).page_size_bytes))
    page = attention(size).page_size_bytes
    recurrent = MambaSpec(**kinds | {"block_size": size, "page_size_padded": page})
    layers = {"A": [attention(size)], "S": [recurrent], "B": [attention(size), recurrent]}
    return Model([spec for kind in pattern for spec in layers[kind]])


def heads_of(heads, head):
    return lambda size: full(heads, head, size)


def types(kind, ssm="auto"):
    """Types of a model's states. ssm: what its configuration or vLLM's hook for it says."""
    return kind(HALF, "auto", ssm)


def nets(key_heads, value_heads):
    """Gated delta nets with heads of 128."""
    return States.gated_delta_net_state_shape(1, key_heads, value_heads, 128, 128, 4)


def mamba2(heads, head, groups, state):
    return States.mamba2_state_shape(1, heads * head, groups, heads, head, state, 4)


def deepseek_v4(layers=43):
    """Latents compressed 4 and 128 times, windows, and the windows of the compressors' states."""

    def compressed(ratio, head, content=None):
        shape = {"size": 256, "tokens_per_state": ratio, "alignment": 576}
        if content is None:
            return latent(head, BYTE, **shape)
        kind = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
        return latent(head, BYTE, state_content_bytes=content, **shape | kind)

    def states(size, width, tokens):
        shape = {"num_kv_heads": 1, "head_size": width, "dtype": SINGLE, "alignment": 576}
        return SlidingWindowMLASpec(block_size=size, sliding_window=tokens, **shape)

    kind = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4", "alignment": 576}
    shape = {"num_kv_heads": 1, "head_size": 512, "dtype": BYTE, "state_content_bytes": 584}
    tail = SlidingWindowMLASpec(block_size=64, sliding_window=128, **shape | kind)
    four = [
        tail,
        compressed(4, 512, 584),
        states(4, 2048, 8),
        compressed(4, 132),
        states(4, 512, 8),
    ]
    many = [tail, compressed(128, 512, 584), states(8, 1024, 128)]
    found = [tail] * 2
    for layer in range(2, layers):
        found += many if layer % 2 else four
    return Model(found, {"index_topk": 512}, ("BLHNC", "BLNHC"))


def ring(layers):
    """An indexer whose keys wait in a ring until they are compressed."""
    shape = {"num_kv_heads": 2, "head_size": 128, "head_size_v": 0, "dtype": HALF}
    tail = CircularBufferSpec(block_size=8, **shape)
    index = latent(132, BYTE, size=128, tokens_per_state=4)
    kind = {"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
    layer = [latent(dtype=BYTE, size=128, **kind), index, tail]
    return Model(layer * layers, {"index_topk": 2048}, ("BLHNC",))


MODELS = {
    "Llama 3.1 8B": Model([full(8, 128)] * 32),
    "Llama 3.3 70B": Model([full(8, 128)] * 80),
    "Qwen3 32B": Model([full(8, 128)] * 64),
    "Qwen3 235B A22B": Model([full(4, 128)] * 94),
    "Mistral Small 3.2 24B": Model([full(8, 128)] * 40),
    "MiniMax M2": Model([full(8, 128)] * 62),
    "DeepSeek V3, R1; Kimi K2": Model([latent()] * 61),
    "DeepSeek V3.2": indexed(61),
    "GLM-5": indexed(78),
    "GLM-5 on SM100": indexed(78, BYTE),
    "DeepSeek V4 Flash": deepseek_v4(),
    "Mistral 7B v0.1": Model([window(4096, 8, 128)] * 32),
    "Gemma 2 9B": Model([window(4096, 8, 256), full(8, 256)] * 21),
    "Gemma 3 27B": Model(
        ([window(1024, 16, 128)] * 5 + [full(16, 128)]) * 10 + [window(1024, 16, 128)] * 2
    ),
    "gpt-oss-20b": Model([window(128, 8, 64), full(8, 64)] * 12),
    "gpt-oss-120b": Model([window(128, 8, 64), full(8, 64)] * 18),
    "Command A": Model(([window(4096, 8, 128)] * 3 + [full(8, 128)]) * 16),
    "Llama 4 Scout": Model(([chunked(8192, 8, 128)] * 3 + [full(8, 128)]) * 12),
    "LFM2 1.2B": hybrid(
        "SSASSASSASASASAS",
        heads_of(8, 64),
        States.short_conv_state_shape(1, 2048, 3),
        Types.short_conv_state_dtype(HALF, "auto"),
    ),
    "Qwen3-Next 80B A3B": hybrid(
        "SSSA" * 12, heads_of(2, 256), nets(16, 32), types(Types.gated_delta_net_state_dtype)
    ),
    "Qwen3.5 397B A17B": hybrid(
        "SSSA" * 15,
        heads_of(2, 256),
        nets(16, 64),
        types(Types.gated_delta_net_state_dtype, "float32"),
    ),
    "Kimi Linear 48B A3B": hybrid(
        "SSSA" * 6 + "SSA",
        lambda size: latent(size=size),
        States.kda_state_shape(1, 32, 128),
        types(Types.kda_state_dtype),
        least=128,
    ),
    "Nemotron-H 8B": hybrid(
        "S" * 4 + "A" + "SSSSSA" * 3 + "S" * 5,
        heads_of(8, 128),
        mamba2(128, 64, 8, 128),
        types(Types.mamba2_state_dtype, NemotronHForCausalLMConfig.DEFAULT_MAMBA_SSM_CACHE_DTYPE),
    ),
    "Nemotron Nano 9B v2": hybrid(
        "SSSSSSSASSSSASSSSASSSSASSSSSSSS",
        heads_of(8, 128),
        mamba2(128, 80, 8, 128),
        types(Types.mamba2_state_dtype, "float32"),
    ),
    "Granite 4.0 H Small": hybrid(
        ("S" * 5 + "A" + "S" * 4) * 4,
        heads_of(8, 128),
        mamba2(128, 64, 1, 128),
        types(Types.mamba2_state_dtype),
    ),
    "Bamba 9B": hybrid(
        ("S" * 9 + "A") + ("S" * 8 + "A") * 2 + "S" * 4,
        heads_of(8, 128),
        mamba2(128, 64, 1, 256),
        types(Types.mamba2_state_dtype),
    ),
    "Jamba 1.5 Mini": hybrid(
        "SSSSASSS" * 4,
        heads_of(8, 128),
        States.mamba1_state_shape(1, 8192, 16, 4),
        types(Types.mamba1_state_dtype),
    ),
    "Falcon-H1 7B": hybrid(
        "B" * 44, heads_of(2, 128), mamba2(24, 128, 1, 256), types(Types.mamba2_state_dtype)
    ),
    "Llama 3.1 8B, EAGLE-3": Model([full(8, 128)] * 33, draft=8),
    "Qwen3 32B, EAGLE-3 with 4 heads": Model([full(8, 128)] * 64 + [full(4, 128)], draft=4),
    "Whisper large v3": Model([full(20, 64), cross(20, 64)] * 32),
    "GLM-5.3 Flash": ring(40),
}
