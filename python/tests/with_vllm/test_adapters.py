"""LoRA adapters whose files change while an engine serves them, and between engines."""

import json
import shutil
from functools import partial

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from forked import live  # noqa: E402
from prompts import PROMPTS, STORED  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

import tiny_model as models  # noqa: E402  isort: skip

PROMPT = PROMPTS[0]
RANK = 8
KINDS = ["old", "new", "config", "other"]


def write(path, kind):
    """Writes an adapter into its folder. `config` differs from `old` in its configuration alone."""
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed({"new": 4, "other": 5}.get(kind, 3))
    weights = {}
    for layer in range(models.LAYERS):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            draw = partial(torch.randn, generator=generator)
            weights[prefix + "A.weight"] = draw(RANK, models.HIDDEN) * 0.1
            weights[prefix + "B.weight"] = draw(models.HIDDEN, RANK)
    save_file(weights, path / "adapter_model.safetensors")
    alpha = 64 if kind == "config" else 8
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha}
    config["target_modules"] = ["q_proj", "v_proj"]
    (path / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def right(model, tmp_path_factory):
    """The answers of each adapter, which were computed."""
    path = tmp_path_factory.mktemp("adapters") / "lora"
    said = {}
    for kind in KINDS:
        write(path, kind)
        said[kind], _ = life(model, path, None, ask)
    assert len({tuple(each) for each in said.values()}) == len(KINDS), "they tell adapters apart"
    return said


def life(model, path, options, body, **more):
    settings = {"model": model, "enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    if options:
        options = options | {"load_async": more.pop("load_async", False)}
    return live(body, path, options=options, **(settings | more))


def named(path, number=1, **more):
    return LoRARequest("a" if number == 1 else "b", number, str(path), **more)


def ask(engine, path, **more):
    """Returns the answer, and how many tokens were found."""
    (answer,), (found,) = engine.ask(PROMPT, lora=named(path, **more))
    return answer, found


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "lora"
    write(path, "old")
    return path


@pytest.mark.parametrize("change", ["new", "config"])
def test_between_engines(model, right, path, options, change):
    """Each has its own blocks, also if nothing but the configuration changed; times do not matter."""
    serve = partial(life, model, path, options, ask)
    assert serve() == (right["old"], 0)
    write(path, change)
    assert serve() == (right[change], 0)
    assert serve() == (right[change], STORED[0])
    write(path, "old")
    assert serve() == (right["old"], STORED[0])


@pytest.mark.parametrize("change", ["new", "config"])
def test_read_again_after_it_was_dropped(model, right, path, both, change):
    """The engine has room for one adapter: that of number 2 takes its place."""

    def body(engine, path):
        answers = []
        write(other := path.parent / "other", "other")
        answers.append(ask(engine, path))
        engine.forget()
        engine.ask(PROMPT, lora=named(other, 2))
        engine.forget()
        write(path, change)
        for _ in range(3):
            answers.append(ask(engine, path))
            engine.forget()
        return answers

    serve = partial(life, model, path, both, load_async=both["load_async"])
    answers = serve(body)
    assert [answer for answer, _ in answers] == [right["old"], *[right[change]] * 3]
    # The first of them stored nothing: it is not known which files its worker read.
    assert [found for _, found in answers] == [0, 0, 0, STORED[0]]
    assert serve(ask) == (right[change], STORED[0])
    write(path, "old")
    assert serve(ask) == (right["old"], STORED[0])


@pytest.mark.parametrize("more", [{}, {"load_inplace": True}], ids=["by-call", "by-request"])
def test_replaced_in_place_while_a_request_runs(model, right, path, both, more):
    def body(engine, path):
        name = engine.add(PROMPT, lora=named(path), max_tokens=100)
        while len(engine.answers[name].tokens) < 20:
            engine.step()
        write(path, "new")
        engine.core.add_lora(named(path, load_inplace=True))
        engine.run()
        engine.forget()
        answers = [ask(engine, path, **more) for _ in range(2)]
        engine.forget()
        return engine.answers[name].tokens, [*answers, ask(engine, path, **more)]

    serve = partial(life, model, path, both, load_async=both["load_async"])
    said, answers = serve(body)
    assert [answer for answer, _ in answers] == [right["new"]] * 3
    # Then in an engine of each adapter, which computes what was generated as well.
    for kind in ("new", "old"):
        write(path, kind)

        def continued(engine, path, said=said):
            return engine.ask(PROMPT + said, lora=named(path))

        expected, _ = life(model, path, None, continued)
        answer, found = serve(continued)
        assert answer == expected
        assert found[0] <= STORED[0] + (kind == "old") * 32


def test_files_that_change_between_call_and_request(model, right, path, options):
    """The engine has read the old ones, before a request came."""

    def body(engine, path):
        engine.core.add_lora(named(path))
        write(path, "new")
        first = ask(engine, path)
        engine.forget()
        return first, ask(engine, path)

    serve = partial(life, model, path, options)
    assert serve(body) == ((right["old"], 0), (right["old"], 0))
    assert serve(ask) == (right["new"], 0), "nothing of the old ones is stored for the new ones"
    # Then these are stored, and are not loaded for a request that computes with the old ones.
    write(path, "old")
    first, second = serve(body, policy="recompute")
    assert (first[0], second) == (right["old"], (right["old"], 0))


def test_what_vllm_has_of_the_files_before_is_not_stored(model, right, path, options):
    """Its own cache does not notice that the files are others."""

    def body(engine, path):
        first = ask(engine, path)
        engine.settle()
        write(path, "new")
        engine.core.add_lora(named(path, load_inplace=True))
        wrong = ask(engine, path)
        engine.settle()
        return first, wrong

    serve = partial(life, model, path, options)
    first, wrong = serve(body)
    assert first == (right["old"], 0) and wrong[1] > 0
    assert serve(ask) == (right["new"], 0)
    assert serve(ask) == (right["new"], STORED[0])


def test_a_copy_elsewhere_has_other_hashes(model, right, path, options):
    """vLLM's hashes have an adapter's path."""
    serve = partial(life, model)
    assert serve(path, options, ask) == (right["old"], 0)
    copy = shutil.copytree(path, path.parent / "copy")
    assert serve(copy, options, ask) == (right["old"], 0)
