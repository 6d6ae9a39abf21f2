"""What the scheduler and the workers tell each other."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class Job:
    """Blocks to be moved. Each worker gets the same."""

    id: int
    request: str
    files: list[int]
    blocks: list[int]
    checksums: list[bytes] = field(default_factory=list)
    """Loads: of each rank."""
    is_async: bool = False


@dataclass
class Tasks(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after a step."""

    loaded: Counter = field(default_factory=Counter)
    """How many workers have ended each load."""
    lost: set[int] = field(default_factory=set)
    """Files that could not be read."""
    written: dict[int, dict[int, bytes | None]] = field(default_factory=dict)
    """By save and rank: its checksums, or None where it failed."""
    dead: str | None = None
    """Why a worker's plane does nothing any more."""

    def aggregate(self, other):
        written = {job: dict(ranks) for job, ranks in self.written.items()}
        for job, ranks in other.written.items():
            written.setdefault(job, {}).update(ranks)
        dead = self.dead or other.dead
        return Reports(self.loaded + other.loaded, self.lost | other.lost, written, dead)

    def __bool__(self):
        return bool(self.loaded or self.lost or self.written or self.dead)
