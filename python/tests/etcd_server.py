"""A server of etcd: the program that RIPIENO_ETCD names, or the installed one."""

import os
import shutil
import subprocess

import pytest
from waiting import kept_port


def program():
    """Returns the program's path, or skips the test."""
    found = os.environ.get("RIPIENO_ETCD") or shutil.which("etcd")
    if not found or os.environ.get("RIPIENO_SKIP_ETCD") == "1":
        pytest.skip("etcd is not installed, and RIPIENO_ETCD names none")
    return found


class Server:
    """etcd with a directory of its own. host: an address of this machine, for its clients."""

    def __init__(self, directory, host="127.0.0.1"):
        client, peer = kept_port(), kept_port()
        self.address = f"{host}:{client}"
        self.command = [
            program(),
            "--data-dir",
            directory,
            "--logger",
            "zap",
            "--log-level",
            "error",
        ]
        for flag, port in [("client", client), ("peer", peer)]:
            url = f"http://{host}:{port}"
            self.command += [f"--listen-{flag}-urls", url]
            initial = "initial-advertise" if flag == "peer" else "advertise"
            self.command += [f"--{initial}-{flag}-urls", url]
        self.command += ["--initial-cluster", f"default=http://{host}:{peer}"]

    def start(self):
        self.process = subprocess.Popen(self.command)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
