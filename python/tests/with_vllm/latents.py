"""A small random model with latents (MLA), as DeepSeek's: each rank has the whole KV cache."""

import json
import pathlib

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, VOCABULARY = 3, 256, 4, 2048
BLOCK, LATENT, ROPE = 16, 512, 64
"""The only sizes of vLLM's CPU backend."""
NOPE = VALUE = 32
# vLLM's kernel for RoPE on a CPU computes keys of latents wrong; DeepSeek's own RoPE has none.
SCALING = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def make(path, layers=LAYERS):
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)

    def weight(rows, columns, gain=1.6):
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": weight(VOCABULARY, HIDDEN, 3.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        weights[name + "self_attn.q_proj.weight"] = weight(HEADS * (NOPE + ROPE), HIDDEN)
        weights[name + "self_attn.kv_a_proj_with_mqa.weight"] = weight(LATENT + ROPE, HIDDEN)
        weights[name + "self_attn.kv_a_layernorm.weight"] = torch.ones(LATENT)
        weights[name + "self_attn.kv_b_proj.weight"] = weight(HEADS * (NOPE + VALUE), LATENT, 3.0)
        weights[name + "self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * VALUE, 3.0)
        weights[name + "mlp.gate_proj.weight"] = weight(2 * HIDDEN, HIDDEN, 1.0)
        weights[name + "mlp.up_proj.weight"] = weight(2 * HIDDEN, HIDDEN, 1.0)
        weights[name + "mlp.down_proj.weight"] = weight(HIDDEN, 2 * HIDDEN, 1.0)
        weights[name + "input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[name + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        # No layer has experts.
        "first_k_dense_replace": layers,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": SCALING,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
