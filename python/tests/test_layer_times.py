"""Layer times that the vLLM connector writes, tested without vLLM."""

import importlib.util
import json
import logging
import pathlib

import pytest

import ripieno

# The package around it imports vLLM.
_file = pathlib.Path(ripieno.__file__).parent / "vllm" / "times.py"
_spec = importlib.util.spec_from_file_location("ripieno_times", _file)
times = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(times)

LAYERS = 3
HEADER = {"ripieno_layer_times": 1, "model": "m", "gpu": "g", "engine": "e", "layers": LAYERS}


class Gpu:
    """A clock that a test sets, and events that a test completes."""

    def __init__(self):
        self.now = self.reached = 0.0
        self.marks = 0

    def mark(self):
        self.marks += 1
        return Event(self, self.now)


class Event:
    def __init__(self, gpu, at):
        self.gpu, self.at = gpu, at

    def query(self):
        return self.gpu.reached >= self.at

    def synchronize(self):
        self.gpu.reached = max(self.gpu.reached, self.at)

    def elapsed_time(self, later):
        assert self.query() and later.query(), "it would wait"
        return later.at - self.at


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def made(tmp_path, gpu):
    return times.LayerTimes(str(tmp_path / "times"), HEADER, gpu.mark)


def lines(made):
    header, *steps = pathlib.Path(made.path).read_text().splitlines()
    assert json.loads(header) == HEADER
    return [json.loads(step) for step in steps]


def step(made, gpu, requests, wait=0.0, layers=range(LAYERS), layer=2.0):
    """Records a step with layers of `layer` ms; before each, `wait` ms for its load."""
    made.begin(requests)
    for at in layers:
        made.layer(at, wait > 0)
        if wait > 0:
            gpu.now += wait
            made.loaded()
        gpu.now += layer
    made.end()


def test_a_step_has_a_line_without_its_waits(made, gpu):
    gpu.reached = 1e9
    step(made, gpu, [[5, 0]])
    assert gpu.marks == 2, "nothing else needs more of them"
    step(made, gpu, [[1, 64], [300, 7]], wait=50.0)
    made.begin([])
    made.end()
    assert lines(made) == [
        {"requests": [[5, 0]], "layer_us": 2000.0},
        {"requests": [[1, 64], [300, 7]], "layer_us": 2000.0},
    ]


def test_nobody_waits_for_a_gpu(made, gpu):
    step(made, gpu, [[5, 0]])
    step(made, gpu, [[6, 0]], layer=3.0)
    assert lines(made) == []
    gpu.reached = 5.0
    made.begin([])
    made.end()
    assert lines(made) == [{"requests": [[5, 0]], "layer_us": 2000.0}]
    gpu.reached = 1e9
    made.end()
    assert [line["layer_us"] for line in lines(made)] == [2000.0, 3000.0]


@pytest.mark.parametrize("layers", [[], [0, 1], [0, 0, 1, 1, 2, 2], [0, 1, 2, 2], [0, 1, 1]])
def test_a_step_whose_layers_are_not_told_of_has_no_line(made, gpu, layers, caplog):
    gpu.reached = 1e9
    with caplog.at_level(logging.WARNING, "vllm.ripieno"):
        step(made, gpu, [[5, 0]], layers=layers)
        step(made, gpu, [[5, 0]], layers=layers)
    assert (lines(made), made.missed) == ([], 2)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"told of {len(layers)} of {LAYERS} layers" in said and "piecewise" in said
    step(made, gpu, [[6, 0]])
    assert [line["requests"] for line in lines(made)] == [[[6, 0]]]


def test_a_file_goes_on_and_does_not_grow_for_ever(tmp_path, gpu, monkeypatch):
    path, gpu.reached = tmp_path / "times", 1e9
    for _ in range(2):
        step(times.LayerTimes(str(path), HEADER, gpu.mark), gpu, [[5, 0]])
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [HEADER == line for line in found] == [True, False, True, False]
    monkeypatch.setattr(times, "BYTES_MAX", path.stat().st_size)
    made = times.LayerTimes(str(path), HEADER, gpu.mark)
    step(made, gpu, [[6, 0]])
    assert [line["requests"] for line in lines(made)] == [[[6, 0]]]
    assert (tmp_path / "times.1").read_text().startswith(json.dumps(HEADER))


def test_a_full_disk_stops_nobody(made, gpu, caplog):
    class Full:
        def write(self, line):
            raise OSError(28, "No space left on device")

    gpu.reached, made.file = 1e9, Full()
    with caplog.at_level(logging.WARNING, "vllm.ripieno"):
        step(made, gpu, [[5, 0]])
        step(made, gpu, [[5, 0]])
    assert [record.getMessage() for record in caplog.records] == [
        f"ripieno: layer_times: no more lines in {made.path}: [Errno 28] No space left on device"
    ]


def test_a_line_that_was_cut_off_spoils_no_other(made, gpu):
    gpu.reached = 1e9
    step(made, gpu, [[5, 0]])
    made.file.write(b'{"requests": [[5,')
    made.close()
    times.LayerTimes(made.path, HEADER, gpu.mark).close()
    *_, cut, header = pathlib.Path(made.path).read_text().splitlines()
    assert cut == '{"requests": [[5,'
    assert json.loads(header) == HEADER


def test_steps_that_a_gpu_had_not_ended_are_in_the_file_at_the_end(made, gpu):
    step(made, gpu, [[5, 0]])
    assert lines(made) == []
    made.close()
    assert len(lines(made)) == 1


def test_a_model_of_one_layer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the model has 1 layer"):
        times.LayerTimes(str(tmp_path / "times"), HEADER | {"layers": 1})
    assert not (tmp_path / "times").exists()
