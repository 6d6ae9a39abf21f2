"""An EAGLE-3 draft, whose layer is stored with those of the model."""

import json

import pytest

pytest.importorskip("vllm")

import tiny_model as models  # noqa: E402
import torch  # noqa: E402
from forked import life_of, live  # noqa: E402
from prompts import BLOCK, tokens, whole  # noqa: E402
from safetensors.torch import save_file  # noqa: E402


def make(path, heads=models.HEADS):
    """Writes a draft of one layer for the tests' model."""
    path.mkdir()
    generator = torch.Generator().manual_seed(9)
    hidden, size = models.HIDDEN, models.HIDDEN // models.HEADS
    inner = 2 * hidden

    def weight(rows, columns):
        return torch.randn(rows, columns, generator=generator) * (1.6 / columns**0.5)

    weights = {
        "embed_tokens.weight": torch.randn(models.VOCABULARY, hidden, generator=generator),
        "lm_head.weight": weight(models.VOCABULARY, hidden),
        "fc.weight": weight(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": weight(hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weight(heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weight(heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weight(hidden, hidden),
        "midlayer.mlp.gate_proj.weight": weight(inner, hidden),
        "midlayer.mlp.up_proj.weight": weight(inner, hidden),
        "midlayer.mlp.down_proj.weight": weight(hidden, inner),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
    for name in (*norms, "midlayer.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": models.HEADS,
        "num_key_value_heads": heads,
        "head_dim": size,
        "num_hidden_layers": 1,
        "vocab_size": models.VOCABULARY,
        "draft_vocab_size": models.VOCABULARY,
        # Of the model, whose outputs the draft is computed from.
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return {"method": "eagle3", "model": str(path), "num_speculative_tokens": 2}


def ask(engine, *prompts):
    """Returns tokens, cached tokens and blocks of each prompt."""
    answers = []
    for prompt in prompts:
        (said,), (cached,) = engine.ask(prompt)
        answers.append((said, cached, engine.pages()))
        engine.forget()
    return answers


def test_hits_have_the_bytes_of_the_drafts_layer(model, both, tmp_path):
    """A draft's KV of a block's last token depends on the next one: another prompt that goes on
    differently behind the shared blocks does not get the last of them."""
    begin = tokens(320)
    one, other = begin + tokens(77), begin + tokens(101)
    settings = {"model": model, "speculative_config": make(tmp_path / "draft")}
    settings["max_num_batched_tokens"] = 1024
    expected = live(ask, one, other, **settings)
    first = live(ask, one, options=both, **settings)
    assert first == expected[:1]
    found = live(ask, one, other, options=both, **settings)
    assert [cached for _, cached, _ in found] == [whole(one) - BLOCK, 320 - BLOCK]
    assert [said for said, _, _ in found] == [said for said, _, _ in expected]
    for (_, _, pages), (_, _, right) in zip(found, expected, strict=True):
        assert pages.items() <= right.items()


def test_a_draft_with_other_heads_is_refused_where_vllm_has_no_layout_for_it(
    model, options, tmp_path
):
    draft = make(tmp_path / "draft", heads=4)
    life = life_of(ask, tokens(40), model=model, options=options, speculative_config=draft)
    assert "RipienoConnector: the layers' pages have different sizes" in life.error
    assert "set VLLM_KV_CACHE_LAYOUT=BLHNC, if" in life.error
    assert "or leave the draft model out" in life.error
