"""The plugin that vLLM loads at its start, with another version of vLLM than ours."""

import pathlib
import subprocess
import sys

import pytest

import ripieno

FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
CONNECTORS = "class KVConnectorFactory:\n    _registry = {}\n"
CONNECTORS += "    register_connector = classmethod(lambda cls, name, *of: cls._registry.update({name: of}))"


def other_vllm(path, files):
    """Makes a vLLM 0.31 that has only these modules."""
    for name, text in files.items():
        for folder in pathlib.PurePath(name).parents:
            (path / folder).mkdir(parents=True, exist_ok=True)
            (path / folder / "__init__.py").touch()
        (path / name).write_text(text)
    (path / "vllm").mkdir(exist_ok=True)
    (path / "vllm" / "__init__.py").write_text('__version__ = "0.31.2"\n')


def run(path, code):
    ours = pathlib.Path(ripieno.__file__).parent.parent
    environment = {"PYTHONPATH": f"{path}:{ours}"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(("files", "is_known"), [({}, False), ({FACTORY: CONNECTORS}, True)])
def test_another_version_goes_on_and_is_told_once(tmp_path, files, is_known):
    other_vllm(tmp_path, files)
    ended = run(tmp_path, "from ripieno.plugin import register; register(); print('goes on')")
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "ripieno works with vLLM 0.32 and 0.33, and vLLM 0.31.2 is installed" in line
    if is_known:
        code = "from ripieno.plugin import register; register();"
        code += "from vllm.distributed.kv_transfer.kv_connector.factory import *;"
        code += "print(KVConnectorFactory._registry)"
        assert "'ripieno.vllm'" in run(tmp_path, code).stdout


@pytest.mark.parametrize("module", ["ripieno.vllm", "ripieno.tiering"])
def test_who_asks_for_a_connector_of_ours_reads_why_not(tmp_path, module):
    other_vllm(tmp_path, {})
    ended = run(tmp_path, f"import {module}")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ripieno works with vLLM 0.32 and 0.33, and vLLM 0.31.2 is"), last
