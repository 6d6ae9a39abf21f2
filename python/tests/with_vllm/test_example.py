"""The example that newcomers run."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/restart.py"


def test_the_second_engine_finds_the_prompt_of_the_first(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, EXAMPLE, tmp_path / "kv"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"(\d+) of (\d+) tokens found.* answer (.*)", done.stdout)
    (none, prompt, expected), (found, again, answer) = lines
    assert (none, again, answer) == ("0", prompt, expected)
    assert int(prompt) > int(found) > int(prompt) - 64, "whole blocks, without the last token"
