"""Layer times that the connector writes are those of the steps that ran."""

import json
import pathlib
import subprocess
import sys
import time
import types

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import tiny_model as models  # noqa: E402
from forked import live, metric  # noqa: E402
from prompts import PROMPTS, tokens  # noqa: E402
from ripieno.vllm import times  # noqa: E402
from scraping import scrape  # noqa: E402
from vllm import __version__  # noqa: E402

A = PROMPTS[3]
"""517 tokens: three steps of at most 256."""


class Late(faults.Plane):
    """A layer of a load arrives after SECONDS of the clock of the layer times."""

    arrivals = 0

    def arrived(self, blocks, layer):
        Late.arrivals += 1


SECONDS = 1000


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


def test_waits_for_loads_are_in_no_layer(model, both, tmp_path, monkeypatch):
    def clock():
        return time.perf_counter() + Late.arrivals * SECONDS

    monkeypatch.setattr(times, "time", types.SimpleNamespace(perf_counter=clock))

    def ask(engine):
        engine.ask(A, max_tokens=2)
        return Late.arrivals

    options = both | {"layer_times": str(tmp_path / "times")}
    live(lambda engine: (engine.ask(A, max_tokens=1), engine.settle()), model=model, options=both)
    assert live(ask, model=model, options=options, plane=Late) >= models.LAYERS
    shapes, took = read(options["layer_times"])
    assert shapes == [[[5, 512]], [[1, 517]]]
    assert max(took) < SECONDS * 1e6 / models.LAYERS / 2


def test_metrics_say_how_much_computing_was_saved(model, options, tmp_path):
    """A rank's own metrics agree with vLLM's, under the same names."""
    options |= {"layer_times": f"{tmp_path}/times", "metrics": f"{tmp_path}/m"}

    def ask(engine):
        engine.ask(A)
        engine.forget()
        engine.ask(A)
        engine.settle()
        _, samples = scrape(options["metrics"])
        counts = ("loaded_bytes_total", "stored_bytes_total", "load_seconds_count")
        own = {name: samples[f"ripieno_{name}"] for name in counts}
        saved = [metric(f"vllm:ripieno_compute_saved_seconds_{it}") for it in ("count", "sum")]
        return own, {name: metric(f"vllm:ripieno_{name}") for name in counts}, saved

    own, of_vllm, (hits, saved) = live(ask, model=model, options=options)
    assert own == of_vllm
    assert (own["load_seconds_count"], hits) == (1, 1)
    _, (_, second, *_) = read(options["layer_times"])
    # The last step with as many tokens as a whole one tells a token's time.
    assert saved == pytest.approx(512 / 256 * second * models.LAYERS / 1e6)


def test_without_the_option_nothing_is_written_or_counted(model, options, tmp_path):
    def ask(engine):
        engine.ask(A, max_tokens=2)
        return engine.worker.times, engine.worker.tasks.computes

    assert live(ask, model=model, options=options) == (None, [])


def test_a_sweep_runs_what_fits(model, tmp_path):
    """Prompts with prefixes in vLLM's cache, and several concurrent requests."""
    vllm = "--dtype float32 --skip-tokenizer-init --enforce-eager --block-size 32"
    vllm += f" --max-model-len 1024 --model {model}"
    sweep = "--inputs 40,900 --prefixes 0,128 --decode-batches 1,3 --rounds 1"
    sweep += f" --out {tmp_path}/times"
    ended = subprocess.run(
        [sys.executable, "-m", "ripieno.vllm.profile", *vllm.split(), *sweep.split()],
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    left_out = [line for line in ended.stderr.splitlines() if line.startswith("left out")]
    limits = "max_model_len, max_num_seqs or KV cache"
    assert left_out == [f"left out: input 900 after 128 does not fit into {limits}"]
    shapes, _ = read(tmp_path / "times")
    for shape in ([[40, 0]], [[900, 0]], [[128, 0]], [[40, 128]], [[1, 130]], [[1, 130]] * 3):
        assert shape in shapes, shape
    assert [path.name for path in tmp_path.iterdir()] == ["times"], "the store is gone"
