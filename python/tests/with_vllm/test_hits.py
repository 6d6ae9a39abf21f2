"""Blocks found in the store equal the ones that would have been computed."""

import json
import shutil

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import tiny_model as models  # noqa: E402
import torch  # noqa: E402
from forked import live  # noqa: E402
from prompts import BLOCK, PROMPTS, SHARED, STORED, alone, together, tokens, whole  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402


def check(how, plane=faults.Plane, *, model, said, filled, load_async):
    options, written = filled
    options = options | {"load_async": load_async}
    answers = live(how, model=model, options=options, plane=plane)
    assert [cached for _, cached, _ in answers] == STORED
    assert [tokens for tokens, _, _ in answers] == said, "tokens"
    found = {key: page for _, _, pages in answers for key, page in pages.items()}
    assert found == written, "bytes"


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("how", [alone, together])
def test_after_a_restart_hits_are_what_was_computed(how, load_async, model, said, filled):
    check(how, model=model, said=said, filled=filled, load_async=load_async)


def test_hits_in_host_memory_are_what_was_computed(model, said, options):
    def ask(engine):
        first = alone(engine)
        return first, alone(engine), engine.plane.stats()

    first, second, stats = live(ask, model=model, options=options | {"dram": "16MiB"})
    assert [tokens for tokens, _, _ in first] == said
    assert [tokens for tokens, _, _ in second] == said
    assert [cached for _, cached, _ in second] == STORED
    assert (stats["dram_miss_blocks_total"], stats["read_bytes_total"]) == (0, 0), "all of it was there"
    assert stats["dram_hit_blocks_total"] > 0


def test_what_waiting_requests_need_is_read_ahead(model, said, filled, tmp_path):
    def ask(engine):
        (answers, cached), stats = engine.ask(*PROMPTS), engine.plane.stats()
        return answers, cached, stats

    # vLLM's own cache has the shared prefixes.
    first, *waiting = [(asked - own) // BLOCK for asked, own in zip(STORED, SHARED, strict=True)]
    # On a busy machine, some of it comes too late.
    for attempt in range(3):
        path = shutil.copytree(filled[0]["path"], tmp_path / f"store-{attempt}")
        options = {"path": path, "dram": "16MiB"}
        # With max_num_seqs=1, all but the first wait for it.
        answers, cached, stats = live(ask, model=model, options=options, max_num_seqs=1)
        assert (answers, cached) == (said, STORED)
        assert stats["dram_prefetched_bytes_total"] > 0
        misses, hits = stats["dram_miss_blocks_total"], stats["dram_hit_blocks_total"]
        assert misses + hits == first + sum(waiting)
        if misses == first:
            break
    assert (misses, hits) == (first, sum(waiting))


@pytest.mark.parametrize(
    ("plane", "notices"),
    [
        (faults.Corrupt, "tokens"),
        (faults.SwappedV, "tokens"),
        (faults.ShiftedRows, "tokens"),
        (faults.Idle, "tokens"),
        # K includes the positions: attention does not depend on the order of the blocks.
        (faults.SwappedBlocks, "bytes"),
    ],
)
def test_that_test_notices(plane, notices, model, said, filled):
    with pytest.raises(AssertionError, match=f"^{notices}"):
        check(alone, plane, model=model, said=said, filled=filled, load_async=False)


def test_a_conversation_goes_on_after_a_restart(model, both):
    """Generated tokens are found, too."""
    question = tokens(32)

    def first(engine):
        (said,), _ = engine.ask(PROMPTS[3], max_tokens=70)
        return said, engine.pages()

    def second(engine, said):
        return *engine.ask(PROMPTS[3] + said + question), engine.pages()

    said, written = live(first, model=model, options=both)
    assert live(first, model=model)[0] == said
    expected, _, _ = live(second, said, model=model)
    answer, cached, pages = live(second, said, model=model, options=both)
    # The last token was not computed.
    assert (answer, cached) == (expected, [whole(PROMPTS[3] + said)])
    assert {key: pages[key] for key in written} == written


def test_salts_keep_tenants_apart(model, both, said):
    def ask(engine, *salts):
        cached = []
        for salt in salts:
            answer, (found,) = engine.ask(PROMPTS[0], salt=salt)
            assert answer == [said[0]]
            cached.append(found)
            engine.forget()
        return cached

    assert live(ask, "a", model=model, options=both) == [0]
    assert live(ask, "b", None, "a", model=model, options=both) == [0, 0, STORED[0]]


def test_several_answers_to_a_prompt(model, both):
    def ask(engine):
        whole = {"n": 3, "output_kind": RequestOutputKind.FINAL_ONLY}
        answers, _ = engine.ask(PROMPTS[0], temperature=0.8, seed=1, **whole)
        return answers, bool(faults.Plane.made and engine.plane.loaded)

    # vLLM on the CPU has no seeds for prompts in chunks.
    settings = {"model": model, "max_num_batched_tokens": 2048}
    expected, _ = live(ask, **settings)
    assert len({tuple(one) for one in expected[0]}) == 3
    # All but the first answer find the prompt in vLLM's own cache, so their counts are not checked.
    for found in (False, True):
        assert live(ask, options=both, **settings) == (expected, found)


def test_prompt_logprobs_are_of_the_whole_prompt(model, both):
    """These need all tokens to be computed, also if they are stored."""

    def ask(engine):
        engine.ask(PROMPTS[0])
        name = engine.add(PROMPTS[0], prompt_logprobs=1)
        engine.run()
        answer = engine.answers[name]
        probable = answer.output.prompt_logprobs[1:]
        found = [p[t].logprob for p, t in zip(probable, PROMPTS[0][1:], strict=True)]
        return answer.tokens, found

    said, expected = live(ask, model=model)
    for _ in range(2):
        answer, found = live(ask, model=model, options=both)
        assert answer == said
        assert found == pytest.approx(expected, abs=1e-3)


def test_guessed_tokens_that_are_wrong_are_not_stored(model, both):
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    settings = {"model": model, "speculative_config": guess}
    prompt = tokens(20) * 15

    def first(engine):
        (said,), _ = engine.ask(prompt, max_tokens=100)
        return said, engine.pages()

    def second(engine, said):
        return *engine.ask(prompt + said + PROMPTS[4]), engine.pages()

    said, written = live(first, options=both, **settings)
    expected, _, _ = live(second, said, model=model)
    answer, cached, pages = live(second, said, options=both, **settings)
    assert (answer, cached) == (expected, [whole(prompt + said)])
    assert {key: pages[key] for key in written} == written


def adapter(path):
    """Writes a LoRA for all attention layers."""
    path.mkdir()
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for layer in range(models.LAYERS):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            weights[prefix + "A.weight"] = torch.randn(8, models.HIDDEN, generator=generator) * 0.1
            weights[prefix + "B.weight"] = torch.randn(models.HIDDEN, 8, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("a", 1, str(path))


def test_an_adapter_has_blocks_of_its_own(model, both, said, tmp_path):
    lora = adapter(tmp_path / "lora")
    settings = {"model": model, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}

    def ask(engine, *loras):
        answers = []
        for lora in loras:
            (answer,), (cached,) = engine.ask(PROMPTS[0], lora=lora)
            answers.append((answer, cached))
            engine.forget()
        return answers

    ((adapted, _),) = live(ask, lora, **settings)
    assert adapted != said[0]
    assert live(ask, lora, options=both, **settings) == [(adapted, 0)]
    hits = [(said[0], 0), (adapted, STORED[0]), (said[0], STORED[0])]
    assert live(ask, None, lora, None, options=both, **settings) == hits
