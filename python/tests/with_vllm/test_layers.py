"""Layer times that the connector writes are those of what was run."""

import json
import pathlib

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import model as models  # noqa: E402
from forked import live  # noqa: E402
from prompts import PROMPTS, tokens  # noqa: E402
from vllm import __version__  # noqa: E402

from ripieno.vllm import profile  # noqa: E402

A = PROMPTS[3]
"""517 tokens: three steps of at most 256."""


class Late(faults.Late):
    """Every layer of a load comes so late."""

    seconds = 0.3


def read(path):
    header, *steps = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    assert header == {
        "ripieno_layer_times": 1,
        "model": header["model"],
        "gpu": "cpu",
        "engine": f"vllm {__version__}",
        "layers": models.LAYERS,
    }
    assert header["model"].endswith("llama float32 tp1")
    assert all(step["layer_us"] > 0 for step in steps)
    return [step["requests"] for step in steps], [step["layer_us"] for step in steps]


def test_each_step_has_a_line_of_what_it_computed(model, options, tmp_path):
    options |= {"layer_times": str(tmp_path / "times")}

    def ask(engine):
        engine.ask(A)
        engine.forget()
        engine.ask(PROMPTS[4], tokens(50), max_tokens=3)

    live(ask, model=model, options=options)
    shapes, _ = read(options["layer_times"])
    decoded = [[[1, 517 + at]] for at in range(23)]
    both = [[[38, 0], [50, 0]], [[1, 38], [1, 50]], [[1, 39], [1, 51]]]
    assert shapes == [[[256, 0]], [[256, 256]], [[5, 512]], *decoded, *both]


def test_waits_for_loads_are_in_no_layer(model, both, tmp_path):
    options = both | {"layer_times": str(tmp_path / "times")}
    live(lambda engine: (engine.ask(A, max_tokens=1), engine.settle()), model=model, options=both)
    live(lambda engine: engine.ask(A, max_tokens=2), model=model, options=options, plane=Late)
    shapes, took = read(options["layer_times"])
    assert shapes == [[[5, 512]], [[1, 517]]]
    assert max(took) < Late.seconds * 1e6 / 2


def test_without_the_option_nothing_is_written_or_counted(model, options, tmp_path):
    def ask(engine):
        engine.ask(A, max_tokens=2)
        return engine.worker.times, engine.worker.tasks.computes

    assert live(ask, model=model, options=options) == (None, [])


def test_a_sweep_runs_what_fits(model, tmp_path, capsys):
    """Prompts after prefixes that vLLM has, and several requests at once."""
    line = f"--model {model} --inputs 40,900 --prefixes 0,128 --decode-batches 1,3 --out x"
    args, _ = profile.parse(line.split())

    def sweep(engine):
        made = profile.Sweep(None)
        made.ask = lambda prompts, count=1: engine.ask(*prompts, max_tokens=count)
        points = list(profile.plan(args, engine.llm.vllm_config))
        for *point, fits in points:
            if fits:
                made.measure(*point)
        return points

    options = {"path": str(tmp_path / "store"), "layer_times": str(tmp_path / "times")}
    points = live(sweep, model=model, options=options)
    assert [point for *point, fits in points if not fits] == [["input", 900, 128]]
    shapes, _ = read(options["layer_times"])
    assert [[40, 0]] in shapes and [[40, 128]] in shapes and [[128, 0]] in shapes
    # The third prompt comes a step later: there is no room for it in the first one.
    assert [[1, 5]] * 3 in shapes and [[1, 130], [1, 130], [1, 129]] in shapes
