"""The configurations to measure."""

import ctypes
import dataclasses
import json
import math
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time


@dataclasses.dataclass(frozen=True)
class Side:
    """One row of the table."""

    title: str
    configuration: dict | None = None
    """Arguments of KVTransferConfig; "FOLDER" in a text stands for this side's directory, and the
    text "BYTES" for the capacity of a store."""
    prefix_caching: bool = True
    environment: dict = dataclasses.field(default_factory=dict)
    reason: str = ""
    """Reason why it cannot run; else empty."""
    note: str = ""
    """Note to its row."""

    def prepare(self, folder, processes, capacity):
        """Returns vLLM's KVTransferConfig. Adds the programs that it starts to `processes`."""
        os.environ.update(self.environment)
        if self.configuration is None:
            return None
        from vllm.config import KVTransferConfig

        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        if self.environment:
            hide_cffi()
        settings = replaced(self.configuration, folder, capacity)
        return KVTransferConfig(kv_role="kv_both", **settings)

    def close(self):
        """Ends the programs that prepare() started."""

    def commands(self):
        """Returns the configuration as text for the report."""
        settings = "".join(f"{name}={value} " for name, value in self.environment.items())
        return f"{settings}--kv-transfer-config '{json.dumps(self.configuration)}'"


@dataclasses.dataclass(frozen=True)
class Served(Side):
    """A side with its own server, which runs as long as the engine."""

    server: list = dataclasses.field(default_factory=list)
    """Command line; "PORT" and "HTTP" stand for free ports, and "GB" for the capacity."""
    running: list = dataclasses.field(default_factory=list)

    def prepare(self, folder, processes, capacity):
        transfer = super().prepare(folder, processes, capacity)
        words = {"PORT": free_port(), "HTTP": free_port(), "GB": str(math.ceil(capacity / 1e9))}
        command = [words.get(word, word.replace("FOLDER", folder)) for word in self.server]
        command[0] = os.path.join(os.path.dirname(sys.executable), command[0])
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)
        self.running.append(server)
        processes.append(server.pid)
        while not listens(words["PORT"]):
            if server.poll() is not None:
                raise RuntimeError(f"Error: {' '.join(command)} ended with {server.returncode}")
            time.sleep(0.2)
        transfer.kv_connector_extra_config["lmcache.mp.port"] = int(words["PORT"])
        return transfer

    def commands(self):
        return f"{super().commands()}; {shlex.join(self.server)}"

    def close(self):
        for server in self.running:
            server.terminate()
            server.wait()


def hide_cffi():
    """Hides cffi's libraries from vLLM's CPU backend, which searches all modules for kernels and
    fails on them. LMCache imports them first (through numba)."""
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def rebind_others(overrides):
        hidden = sys.modules.pop("llvmlite.binding.ffi", None)
        rebind(overrides)
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden

    dispatcher._rebind_kernels = rebind_others


def end_with_parent():
    """Makes the server end with its parent, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port))) == 0


def replaced(value, folder, capacity):
    if isinstance(value, dict):
        return {key: replaced(each, folder, capacity) for key, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, folder, capacity) for each in value]
    if value == "BYTES":
        return capacity
    return value.replace("FOLDER", folder) if isinstance(value, str) else value


def ripieno(**options):
    return {
        "kv_connector": "RipienoConnector",
        "kv_connector_module_path": "ripieno.vllm",
        "kv_connector_extra_config": {"path": "FOLDER", "capacity": "BYTES", **options},
    }


def offloading(tier):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "host_tiering",
            "cpu_bytes_to_use": "BYTES",
            "secondary_tiers": [tier],
        },
    }


SIDES = {
    "computed": Side("computed again", prefix_caching=False),
    "prefix": Side("vLLM's prefix cache"),
    "example": Side(
        "ExampleConnector",
        {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": "FOLDER"},
        },
        note="it finds whole prompts only, and so nothing of 2,000 + 1,000 tokens. It writes "
        "through the page cache, and checks nothing it reads.",
    ),
    "offload": Side(
        "vLLM's offloading, file tier",
        offloading({"type": "fs", "root_dir": "FOLDER"}),
        note="vLLM refuses it for a KV cache in host memory; here its worker is replaced by one "
        "that copies with memmove (bench/peers/host_tiering.py). Before a restart its CPU tier has "
        "everything.",
    ),
    "simple": Side(
        "vLLM's SimpleCPUOffloadConnector, disk",
        {
            "kv_connector": "HostOffloadConnector",
            "kv_connector_module_path": "host_offload",
            "kv_connector_extra_config": {
                "kv_offload_backend": "disk",
                "disk_path": "FOLDER/blocks",
                "disk_capacity_bytes": "BYTES",
            },
        },
        note="its copies are CUDA's; here memmove takes their place (bench/peers/host_offload.py). "
        "It removes its file when it ends, and so finds nothing after a restart.",
    ),
    "lmcache": Served(
        "LMCache, multi-process",
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": "127.0.0.1"},
        },
        environment={"LMCACHE_TRACK_USAGE": "false"},
        note="chunks of 256 tokens, its default; of 3,000 tokens it finds 2,816. Before a restart "
        "it has everything in memory (L1). Transfer is engine_driven through shared memory. vLLM's "
        "search for kernels stumbles over a library that LMCache imports; it is hidden from it.",
        server=[
            "lmcache", "server", "--host", "127.0.0.1", "--port", "PORT", "--http-port", "HTTP",
            "--l1-size-gb", "GB", "--l1-init-size-gb", "GB", "--eviction-policy", "LRU",
            "--supported-transfer-mode", "auto", "--shm-name", "ripieno-peers",
            "--disable-observability", "--l2-adapter",
            json.dumps({"type": "fs_native", "base_path": "FOLDER", "use_odirect": True}),
        ],
    ),
    "lmcache-disk": Side(
        "LMCache, local disk by itself",
        reason="LMCache 0.5.6 moves KV caches in host memory in its multi-process mode only: "
        "LMCacheConnectorV1Dynamic with LMCACHE_LOCAL_DISK says \"No supported cpu connector "
        "found\", and computes everything",
    ),
    "layers": Side("Ripieno, layer by layer", ripieno(load_async=False)),
    "tier": Side(
        "Ripieno, below vLLM's offloading",
        offloading(
            {
                "type": "RipienoTier",
                "module_path": "ripieno.tiering",
                "path": "FOLDER",
                "capacity": "BYTES",
            }
        ),
    ),
    "async": Side("Ripieno, asynchronous", ripieno(load_async=True)),
}

OURS = ["layers", "async", "tier"]
