"""KV memory on a GPU at a server, over the stand-in for libcuda that the tests in Rust use: server
and engine are processes that load it."""

import os
import subprocess
import sys
from pathlib import Path

from served_gpu import SHAPE
from serving import Server

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


def test_a_server_moves_kv_memory_on_a_gpu(tmp_path, monkeypatch):
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]
    command += ["-fno-strict-aliasing", "-DMOCK_LEVEL=13", "-I", KERNELS / "include"]
    command += [KERNELS / "mock/libcuda.cpp", "-o", tmp_path / "libcuda.so", "-ldl"]
    subprocess.check_call(command)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with Server(tmp_path, SHAPE) as server:
        subprocess.check_call([sys.executable, HERE / "served_gpu.py", server.socket])
        status = server.settled()
        assert status["files_stored"] == 4
        assert (status["files_writing"], status["files_referenced"]) == (0, 0)
        assert status["refused_calls"] == 0
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "mock-gpu" not in maps, "the engine's memory is still mapped"
