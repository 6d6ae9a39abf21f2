"""Layer times while vLLM serves, for `ripieno bench table --layer-times`.

A layer's time is from its attention to that of the next one, as the connector's hooks see them: its
own attention, the rest of the layer, and the next one's work before its attention. Waits for loads
are excluded. Steps in which vLLM did not call the hooks once for each layer are left out.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from io import FileIO
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSION = 1
PROMPT_TOKENS = 256
"""Tokens of a step from which on a token's time is that of a prompt."""
BYTES_MAX = 64 << 20
"""Size limit of the file. It is then renamed to PATH.1, which replaces an older one."""

# vLLM shows only messages logged below its own name.
logger = logging.getLogger("vllm.ripieno")


class Mark(Protocol):
    """A point in time, as a CUDA event records it."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, later: Any) -> float: ...


class Instant:
    """The current time on the CPU, with the interface of a CUDA event."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Instant) -> float:
        """Returns milliseconds."""
        return (later.at - self.at) * 1e3


def on_stream() -> Mark:
    """Records an event on the current CUDA stream. Does not wait for it."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    mark: Mark = event
    return mark


def header_of(vllm_config: VllmConfig, device: str, layers: int) -> dict[str, Any]:
    """Returns the setting of the times. Other influences do not change within one setting."""
    import torch
    from vllm import __version__

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    kind = str(model.dtype).removeprefix("torch.")
    quantized = f" {model.quantization}" if model.quantization else ""
    return {
        "ripieno_layer_times": VERSION,
        "model": f"{model.model} {kind}{quantized} tp{parallel.tensor_parallel_size}",
        "gpu": "cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        "engine": f"vllm {__version__}",
        "layers": layers,
    }


class StepTimes:
    """Times of steps, from the connector's first call in it to the last one."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self.mark = mark
        self.begun: tuple[int, Mark] | None = None
        self.ended: deque[tuple[int, Mark, Mark]] = deque()
        """Steps that a GPU may not have finished: tokens, begin and end."""

    def begin(self, tokens: int) -> None:
        """Begins a step that computes these tokens. 0: its time is not wanted."""
        self.begun = (tokens, self.mark()) if tokens else None

    def end(self) -> None:
        if self.begun:
            self.ended.append((*self.begun, self.mark()))
            self.begun = None

    def take(self) -> list[tuple[int, float]]:
        """Returns tokens and seconds of the steps that have ended since the last call."""
        taken = []
        while self.ended and self.ended[0][2].query():
            tokens, begin, end = self.ended.popleft()
            taken.append((tokens, begin.elapsed_time(end) / 1e3))
        return taken


class LayerTimes:
    """Appends a line for each step to a file."""

    def __init__(
        self, path: str, header: dict[str, Any], mark: Callable[[], Mark] = Instant
    ) -> None:
        self.path, self.mark = path, mark
        self.layers: int = header["layers"]
        if self.layers < 2:
            raise ValueError("layer_times: the model has 1 layer, a time needs 2; leave it out")
        self.header = json.dumps(header)
        self.requests: list[list[int]] = []
        """Requests of this step: [tokens to compute, tokens before them] of each."""
        self.seen: list[int] = []
        """Layers of this step that began."""
        self.marks: list[Mark] = []
        """Time marks of this step."""
        self.ended: deque[tuple[list[list[int]], list[tuple[Mark, Mark]]]] = deque()
        """Steps that a GPU has not finished: requests, and spans between two marks."""
        self.written = self.missed = 0
        self.token_seconds = 0.0
        """Time of all layers for a token of a prompt, in the last such step; 0 before one."""
        self.file: FileIO | None = None
        self._open()

    def _open(self) -> None:
        """Opens the file and writes the header, since lines of another engine may precede it."""
        self.file = open(self.path, "a+b", buffering=0)
        if size := self.file.seek(0, os.SEEK_END):
            # Ends a line that was cut off by a full disk or a crash.
            self.file.seek(size - 1)
            if self.file.read(1) != b"\n":
                self.file.write(b"\n")
        self._write(self.header)

    def begin(self, requests: list[list[int]]) -> None:
        """Begins a step with these requests."""
        self.requests, self.seen, self.marks = requests, [], []

    def layer(self, layer: int, waits: bool) -> None:
        """Records that a layer's attention is next. waits: its load is waited for, then loaded()
        follows."""
        self.seen.append(layer)
        if self.requests and (waits or len(self.seen) in (1, self.layers)):
            self.marks.append(self.mark())

    def loaded(self) -> None:
        if self.requests:
            self.marks.append(self.mark())

    def end(self) -> None:
        """Ends a step. Its times count if every layer was reported once."""
        # A layer's end is the next one's begin: one mark, or two with the wait between them.
        marks = self.marks[1:] if len(self.marks) > 2 else self.marks
        spans = list(zip(marks[::2], marks[1::2], strict=False))
        is_whole = len(self.seen) == len(set(self.seen)) == self.layers
        if self.requests and is_whole and len(self.marks) in (2, 2 * self.layers):
            self.ended.append((self.requests, spans))
        elif self.requests:
            self._miss()
        self.requests = []
        self._write_ended()

    def _write_ended(self) -> None:
        while self.ended and self.ended[0][1][-1][1].query():
            requests, spans = self.ended.popleft()
            took = sum(begin.elapsed_time(end) for begin, end in spans)
            layer_us = round(took * 1e3 / (self.layers - 1), 1)
            if layer_us > 0:
                self._write(json.dumps({"requests": requests, "layer_us": layer_us}))
                self.written += 1
                tokens = sum(count for count, _ in requests)
                if tokens >= PROMPT_TOKENS:
                    self.token_seconds = layer_us * self.layers / tokens / 1e6

    def _miss(self) -> None:
        self.missed += 1
        if self.missed == 1:
            logger.warning(
                "ripieno: layer_times: vLLM told of %d of %d layers in a step, which has no line, "
                "like those after it. FULL CUDA graphs do that, and overlapping microbatches: set "
                "piecewise",
                len(self.seen),
                self.layers,
            )

    def _write(self, line: str) -> None:
        if self.file is None:
            return
        try:
            self.file.write(line.encode() + b"\n")
            if self.file.tell() > BYTES_MAX:
                self.file.close()
                os.replace(self.path, f"{self.path}.1")
                self._open()
        except OSError as error:
            self.file = None
            logger.warning("ripieno: layer_times: no more lines in %s: %s", self.path, error)

    def close(self) -> None:
        for _, spans in self.ended:
            spans[-1][1].synchronize()
        self._write_ended()
        if self.file is not None:
            self.file.close()
            self.file = None
        logger.info(
            "ripieno: layer times of %d steps are in %s; %d steps had none",
            self.written,
            self.path,
            self.missed,
        )
