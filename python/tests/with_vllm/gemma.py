"""A small random Gemma 3: two of three layers have a sliding window of 64 tokens, so that vLLM
has several KV cache groups."""

import json
import pathlib

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, INNER, HEADS, VOCABULARY, WINDOW = 6, 256, 512, 8, 2048, 64
KINDS = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(LAYERS)]


def make(path, kinds=KINDS):
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)

    def weight(rows, columns, gain=1.6):
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator) / 16,
        "lm_head.weight": weight(VOCABULARY, HIDDEN, 3.0),
        "model.norm.weight": torch.zeros(HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part in "qkvo":
            weights[name + f"self_attn.{part}_proj.weight"] = weight(HIDDEN, HIDDEN)
        for part in "qk":
            weights[name + f"self_attn.{part}_norm.weight"] = torch.ones(HIDDEN // HEADS)
        weights[name + "mlp.gate_proj.weight"] = weight(INNER, HIDDEN)
        weights[name + "mlp.up_proj.weight"] = weight(INNER, HIDDEN)
        weights[name + "mlp.down_proj.weight"] = weight(HIDDEN, INNER)
        # Gemma's norms multiply by this plus 1.
        for part, gain in [
            ("input_layernorm", 0.0),
            ("post_attention_layernorm", 3.0),
            ("pre_feedforward_layernorm", 0.0),
            ("post_feedforward_layernorm", 0.0),
        ]:
            weights[name + f"{part}.weight"] = torch.full((HIDDEN,), gain)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "sliding_window": WINDOW,
        "layer_types": kinds,
        "query_pre_attn_scalar": HIDDEN // HEADS,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(config))
