"""A random Llama for timing, as weight files, whose greedy tokens depend on the whole context.

With bfloat16, a block of 32 tokens has 64 KiB in each layer, as 16 tokens of Llama-3-8B have.
"""

import json
import pathlib

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, INNER, HEADS, HEAD, VOCABULARY = 8, 640, 1536, 4, 128, 2048
DTYPES = {"bfloat16": 2, "float32": 4}
"""Bytes of a number."""


def fastest():
    """Returns the type that this processor computes with. Without instructions for it, bfloat16
    takes 12 times as long as float32."""
    with open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"


def token_bytes(dtype):
    """Returns the bytes of a token in the KV cache."""
    return LAYERS * HEADS * 2 * HEAD * DTYPES[dtype]


def make(path, dtype):
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)

    def weight(rows, columns, gain=1.6):
        values = torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)
        return values.to(getattr(torch, dtype))

    def ones():
        return torch.ones(HIDDEN, dtype=getattr(torch, dtype))

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": weight(VOCABULARY, HIDDEN, 3.0),
        "model.norm.weight": ones(),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights[name + "self_attn.q_proj.weight"] = weight(HEADS * HEAD, HIDDEN)
        weights[name + "self_attn.k_proj.weight"] = weight(HEADS * HEAD, HIDDEN)
        weights[name + "self_attn.v_proj.weight"] = weight(HEADS * HEAD, HIDDEN, 3.0)
        weights[name + "self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD, 3.0)
        weights[name + "mlp.gate_proj.weight"] = weight(INNER, HIDDEN, 1.0)
        weights[name + "mlp.up_proj.weight"] = weight(INNER, HIDDEN, 1.0)
        weights[name + "mlp.down_proj.weight"] = weight(HIDDEN, INNER, 1.0)
        weights[name + "input_layernorm.weight"] = ones()
        weights[name + "post_attention_layernorm.weight"] = ones()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
