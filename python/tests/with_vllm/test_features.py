"""What the connector does beside finding blocks, in real engines."""

import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("vllm")
import model  # noqa: E402

HERE = pathlib.Path(__file__).parent
# Whole blocks of the prompt of 420 tokens.
WHOLE = 13 * 32


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With a model, and the package's entry points as an installation has them."""
    place = tmp_path_factory.mktemp("features")
    model.make(place / "model")
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    installed = place / "site" / "ripieno-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ripieno\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]"] + [f"{name} = {value}" for name, value in entries.items()]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return place


def live(place, scenario, store, *arguments, **environment):
    """What a scenario of features.py returned, and what the engine logged."""
    path = os.pathsep.join(filter(None, [str(place / "site"), os.environ.get("PYTHONPATH")]))
    program = HERE / "features.py"
    command = [sys.executable, "-P", program, scenario, place / "model", place / store]
    ended = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-6000:]
    return json.loads([line for line in ended.stdout.splitlines() if line[:1] == "{"][-1]), said


def lines(said, text):
    return [line for line in said.splitlines() if text in line]


def test_metrics_events_and_resets(place):
    _, said = live(place, "main_life", "main")
    (line,) = lines(said, "KV Transfer metrics:")
    for part in ("hit_tokens=832", "stored_blocks=", "mean_load_seconds="):
        assert part in line


def test_the_plugin_imports_little():
    code = "import sys, ripieno.plugin; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr


def test_steps_without_hooks_wait_for_their_loads(place):
    result, _ = live(place, "full_graph", "full")
    assert result["tokens"][0] == result["tokens"][1]
    assert result["cached"] == [[0], [WHOLE]]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_blocks_before_one_that_failed_are_used(place, how):
    result, _ = live(place, "partial", f"partial-{how}", how)
    assert result["same"]
    assert (result["failures"], result["mismatches"]) == (1, 1)
    # From the damaged block on, and what was generated.
    assert result["computed"] < 420 - 8 * 32 + 420 - WHOLE + 40, "the first eight were kept"
    assert result["again"] == [WHOLE]


@pytest.mark.parametrize(("mode", "dropped"), [("drain", 0), ("drop", 13)])
def test_the_end_with_saves_on_their_way(place, mode, dropped):
    _, said = live(place, "shutdown", mode, mode)
    (line,) = lines(said, "ripieno: shutdown")
    assert f"({mode}): 13 blocks were on their way, {dropped} of them were dropped" in line
    assert f"'stored': {3 + 13 - dropped}" in line


@pytest.mark.parametrize("waits", ["yes", "no"])
def test_blocks_are_used_again_when_their_saves_have_ended(place, waits):
    result, _ = live(place, "reuse", f"reuse-{waits}", waits)
    assert result["preempted"] > 0
    assert sum(result["cached"]) > (1000 if waits == "yes" else 0)
    assert result["same"] == (waits == "yes")


def test_a_drive_that_is_gone(place):
    result, said = live(place, "dead", "dead")
    assert result == {"same": True, "cached": [0, 0]}
    assert len(lines(said, "the drive is gone")) == 1


@pytest.mark.parametrize(("name", "whole"), [("mla", 416), ("gemma3", 416)])
def test_other_kinds_of_attention(place, name, whole):
    result, _ = live(place, "architecture", name, name)
    assert (result["same"], result["cached"]) == (True, [whole])
    assert all(result["right"])
