"""Messages between the scheduler and the workers."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from ripieno import side_files

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")


@dataclass(frozen=True)
class Job:
    """Blocks to be moved. Each worker gets the same job."""

    id: int
    request: str
    files: list[int]
    blocks: list[int]
    checksums: list[bytes] = field(default_factory=list)
    """Loads: the checksums of each rank."""
    is_async: bool = False
    tokens: int = 0
    """Loads: tokens that need not be computed."""
    trace: Mapping[str, str] | None = None
    """Loads: the trace headers of the request."""
    groups: list[int] = field(default_factory=list)
    """Saves: the group of each block."""
    adapter: tuple[int, str] | None = None
    """Loads of a request with an adapter: its number, and the digest of its files."""


@dataclass(frozen=True)
class Ahead:
    """A request that waits."""

    number: int
    files: list[int]
    checksums: list[bytes]
    """Of each rank."""
    steps: int
    """Steps after which it will run, as far as is known."""


@dataclass
class Tasks(KVConnectorMetadata):
    """Message from the scheduler to the workers in a step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    ahead: list[Ahead] = field(default_factory=list)
    """Waiting requests, whose files are to be read into host memory."""
    withdrawn: list[tuple[int, bool]] = field(default_factory=list)
    """Announced requests that run now (True) or were aborted."""
    reused: list[int] = field(default_factory=list)
    """Earlier saves whose blocks this step may overwrite: they must end first."""
    computes: list[list[int]] = field(default_factory=list)
    """For layer_times: [tokens to compute, tokens before them] of each request."""
    tokens: int = 0
    """Tokens to compute, if they are many of one prompt."""
    is_idle: bool = False
    """True when no tokens are computed: the step only serves transfers in flight."""


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """Message from the workers to the scheduler after a step."""

    loaded: Counter[int] = field(default_factory=Counter)
    """Number of workers that have ended each load."""
    corrupted: set[int] = field(default_factory=set)
    """Loads with blocks that failed to load."""
    lost: set[int] = field(default_factory=set)
    """Files that could not be read."""
    written: dict[int, dict[int, bytes | None]] = field(default_factory=dict)
    """Checksums by save and rank, or None where the save failed."""
    dead: str | None = None
    """The reason if a worker's plane has failed permanently, else None."""
    adapters: dict[int, str] = field(default_factory=dict)
    """By number of an adapter that the worker has read: the digest of its files; nothing if they
    changed meanwhile, or are others at another worker."""
    waited: dict[int, float] = field(default_factory=dict)
    """By load that succeeded: seconds that it was waited for, at the slowest worker."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of steps that computed prompts."""

    def aggregate(self, other: Reports) -> Reports:
        written = {job: dict(ranks) for job, ranks in self.written.items()}
        for job, ranks in other.written.items():
            written.setdefault(job, {}).update(ranks)
        adapters = self.adapters | other.adapters
        for number in self.adapters.keys() & other.adapters.keys():
            if self.adapters[number] != other.adapters[number]:
                adapters[number] = ""
        waited = self.waited | other.waited
        for job in self.waited.keys() & other.waited.keys():
            waited[job] = max(self.waited[job], other.waited[job])
        return Reports(
            self.loaded + other.loaded,
            self.corrupted | other.corrupted,
            self.lost | other.lost,
            written,
            self.dead or other.dead,
            adapters,
            waited,
            self.steps + other.steps,
        )

    def __bool__(self) -> bool:
        ended = self.loaded or self.lost or self.written or self.steps
        return bool(ended or self.dead or self.adapters)


class Legacy:
    """Reports left by workers when they were closed: files beside the store, one for each rank. The
    scheduler is closed after the workers, often in another process."""

    @staticmethod
    def leave(path: str, rank: int, reports: Reports) -> None:
        """Writes a worker's reports, whole or not at all."""
        written = {
            job: {rank: sums if sums is None else sums.hex() for rank, sums in ranks.items()}
            for job, ranks in reports.written.items()
        }
        name = os.path.join(path, f"reports-{rank}.json")
        fields = [reports.loaded, list(reports.corrupted), list(reports.lost), written]
        side_files.write(name, [*fields, reports.dead, reports.adapters])

    @staticmethod
    def take(path: str) -> Reports | None:
        """Removes and returns the aggregated reports of all workers, or None if there are none."""
        taken: Reports | None = None
        for name in glob.glob(os.path.join(glob.escape(path), "reports-*.json")):
            try:
                with open(name) as file:
                    reports = Legacy._parsed(*json.load(file))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                logger.warning(
                    "ripieno: %s is damaged (%s): the blocks that were stored last are not found",
                    name,
                    error,
                )
                reports = Reports()
            os.remove(name)
            taken = reports if taken is None else taken.aggregate(reports)
        return taken

    @staticmethod
    def _parsed(
        loaded: Any, corrupted: Any, lost: Any, written: Any, dead: Any, adapters: Any
    ) -> Reports:
        parsed = {
            int(job): {
                int(rank): sums if sums is None else bytes.fromhex(sums)
                for rank, sums in ranks.items()
            }
            for job, ranks in written.items()
        }
        loads = Counter({int(job): int(count) for job, count in loaded.items()})
        read = {int(number): digest for number, digest in adapters.items()}
        return Reports(loads, set(corrupted), set(lost), parsed, dead, read)
