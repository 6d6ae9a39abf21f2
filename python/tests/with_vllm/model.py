"""A small random Llama, as weight files, whose greedy tokens depend on the whole context.

vLLM's load_format="dummy" draws weights so small that logits are almost without context: a wrong KV
cache would change no token.

    python model.py DIRECTORY
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 256, 8, 2048


def make(path, seed=1, layers=LAYERS, hidden=HIDDEN, heads=HEADS, positions=4096):
    inner = 2 * hidden
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows, columns, gain=1.6):
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=generator),
        "lm_head.weight": weight(VOCABULARY, hidden, 3.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        weights[name + "self_attn.q_proj.weight"] = weight(hidden, hidden)
        weights[name + "self_attn.k_proj.weight"] = weight(hidden, hidden)
        weights[name + "self_attn.v_proj.weight"] = weight(hidden, hidden, 3.0)
        weights[name + "self_attn.o_proj.weight"] = weight(hidden, hidden, 3.0)
        weights[name + "mlp.gate_proj.weight"] = weight(inner, hidden, 1.0)
        weights[name + "mlp.up_proj.weight"] = weight(inner, hidden, 1.0)
        weights[name + "mlp.down_proj.weight"] = weight(hidden, inner, 1.0)
        weights[name + "input_layernorm.weight"] = torch.ones(hidden)
        weights[name + "post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


if __name__ == "__main__":
    make(sys.argv[1])
