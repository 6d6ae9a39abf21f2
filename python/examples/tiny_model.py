"""Makes a small random Llama, whose greedy tokens depend on the whole context: 20 MB, no download.

    python tiny_model.py DIRECTORY

vLLM's load_format="dummy" draws weights so small that logits are almost without context: a wrong KV
cache would change no token.
"""

import json
import os
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 256, 8, 2048


def make(
    path: str | os.PathLike[str],
    seed: int = 1,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    heads: int = HEADS,
    positions: int = 4096,
) -> pathlib.Path:
    """Writes configuration, weights and tokenizer into a new directory, and returns its path."""
    inner = 2 * hidden
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    make_tokenizer(path)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, gain: float = 1.6) -> torch.Tensor:
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


def make_tokenizer(path: pathlib.Path) -> None:
    """Writes a tokenizer with a token for each byte, after those for begin and end."""
    special = ["<unk>", "<s>", "</s>"]
    letters = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(sys.argv[1])
