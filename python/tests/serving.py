"""A server of a store: the program `ripieno serve`, which RIPIENO_PROGRAM names. The store is in a
directory, or on the drives of RIPIENO_DRIVES, which it overwrites: PCI addresses, with commas."""

import json
import os
import signal
import socket
import subprocess

import pytest
from waiting import until

CONFIG = """
socket = "{socket}"
[store]
{store}
pacing = {pacing}
[shape]
layers = {shape.layers}
segments = {shape.segments}
object_bytes = {shape.object_bytes}
block_tokens = {shape.block_tokens}
"""
CAPACITY = "64MiB"


class Server:
    """A server with a store in this directory, killed at the end of a `with`."""

    def __init__(self, directory, shape, pacing=False):
        self.program = os.environ.get("RIPIENO_PROGRAM")
        if not self.program:
            pytest.skip("RIPIENO_PROGRAM is not set: no program to serve a store")
        # A socket's path has 108 bytes.
        self.socket = os.path.relpath(directory / "sock")
        self.config = directory / "ripieno.toml"
        store = f'path = "{directory / "store"}"\ncapacity = "{CAPACITY}"'
        if drives := os.environ.get("RIPIENO_DRIVES"):
            drives = drives.split(",")
            self.format(drives, shape)
            store = f"drives = {json.dumps(drives)}"
        values = {"socket": self.socket, "store": store, "shape": shape}
        self.config.write_text(CONFIG.format(**values, pacing=str(pacing).lower()))
        self.start()

    def format(self, drives, shape):
        numbers = (shape.layers, shape.segments, shape.object_bytes, shape.block_tokens)
        command = [self.program, "format", "--shape", ",".join(map(str, numbers))]
        command += ["--devices", ",".join(f"vfio:{drive}" for drive in drives)]
        command += ["--capacity", CAPACITY, "--overwrite", "anything", "--no-undo"]
        subprocess.check_call(command, stdout=subprocess.DEVNULL)

    def start(self):
        command = [self.program, "serve", "--config", self.config]
        self.process = subprocess.Popen(command)
        until(self.answers, "no server")

    def answers(self):
        assert self.process.poll() is None, "the server has ended"
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(self.socket) == 0

    def status(self):
        return self.control("status")

    def control(self, *words):
        command = [self.program, "ctl", "--socket", self.socket, "--json", *words]
        return json.loads(subprocess.check_output(command))

    def settled(self):
        """Returns the state when no client is left."""
        until(lambda: not self.status()["sessions"], "clients are left")
        return self.status()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
