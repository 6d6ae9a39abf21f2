"""Where the store is: in a directory of this engine's own, or at a server that others use as well."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from vllm.logger import init_logger

import ripieno
from ripieno import capacity

from .layout import engines_of, register
from .pages import move_to_pages, move_to_shared
from .protocol import Legacy, Reports

if TYPE_CHECKING:
    from . import RipienoConnector
    from .saver import Stream

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")

ASK_SECONDS, ASK_KEYS = 1.0, 2048
"""How often a server is asked if announced blocks are still stored, and of how many at once."""

Catalog: TypeAlias = ripieno.Catalog | ripieno.ServedCatalog
Plane: TypeAlias = ripieno.Plane | ripieno.ServedPlane
Caches: TypeAlias = dict[str, torch.Tensor | list[torch.Tensor]]
"""The KV cache of each layer."""


class Place(Protocol):
    """Where the store is. The scheduler opens its catalog, and a worker its plane."""

    path: str
    plane: Plane
    events_path: str | None = None
    """A file for the events of stored blocks, if it can be known which of them are gone."""
    gives_up: bool
    """True if the connector gives a store up that fails again and again. A server does so by
    itself, and may come back."""
    is_paced: bool = False
    """True if the store decides when layers start."""
    paced: ripieno.Plane | None = None
    """The plane, if it does so by the engine's steps."""

    def open_catalog(self) -> Catalog: ...

    def files(self, space: int, keys: Sequence[bytes]) -> list[int]:
        """Returns the files of the longest stored prefix that are to be read ahead."""
        return []

    def state_of(self, space: int, key: bytes) -> str:
        """Returns why a key is not found: a reason of metrics.REASONS, or "stored"."""
        return "absent"

    def take_dropped(self, spaces: Sequence[int]) -> list[bytes]:
        """Returns the keys that were dropped since the last call, as far as is known."""
        return []

    def announced(self, space: int, keys: Sequence[bytes]) -> None:
        """Notes keys of which events told."""
        return

    def last_reports(self, saves: Iterable[int]) -> Reports | None:
        """Returns what the workers reported when they were closed. saves: those without reports."""

    def open_plane(self, rank: int, caches: Caches) -> tuple[list[torch.Tensor], ripieno.Pool]:
        """Moves the KV cache to memory that the store reads into, and opens a rank's plane. Returns
        the same as register()."""

    def join(self, job: int, layer: int, stream: Stream) -> None:
        """Has the stream wait for a layer; without a stream, the call waits."""
        self.plane.wait(job, layer)

    def forget(self, files: list[int]) -> None:
        """Has the plane forget what was in files: another worker has stored other blocks in them."""
        return

    def leave(self, rank: int, reports: Reports) -> None:
        """Leaves a worker's last reports for the scheduler, before the plane is closed."""
        return


def place_of(connector: RipienoConnector, name: str) -> Place:
    """Returns the place of a store. name: of a store's directory, with the layout of its files."""
    if connector.options.server is None:
        return OwnStore(connector, name)
    return ServedStore(connector, connector.options.server)


class OwnStore(Place):
    """A store in a directory, whose drives only this engine has."""

    gives_up = True

    def __init__(self, connector: RipienoConnector, name: str) -> None:
        options, parallel = connector.options, connector._vllm_config.parallel_config
        engines = engines_of(parallel, options)
        if engines > 1:
            name += f"-dp{parallel.data_parallel_index}"
        self.connector, self.path = connector, os.path.join(options.path, name)

        # Workers start before the scheduler; the first process creates the store.
        def make(bytes: int) -> list[ripieno.RankId]:
            return ripieno.prepare(
                self.path,
                connector.shape,
                ranks=connector.ranks,
                capacity=bytes,
                **options.store,
            )

        self.events_path = os.path.join(self.path, "events")
        self.ranks = capacity.made_in(options.path, name, options.capacity, make, engines)

    def open_catalog(self) -> Catalog:
        self.catalog = ripieno.Catalog(self.path)
        # Discards reports that an earlier engine left when it was killed.
        Legacy.take(self.path)
        return self.catalog

    def files(self, space: int, keys: Sequence[bytes]) -> list[int]:
        return self.catalog.files(space, keys)

    def state_of(self, space: int, key: bytes) -> str:
        return self.catalog.state_of(space, key)

    def take_dropped(self, spaces: Sequence[int]) -> list[bytes]:
        return self.catalog.take_dropped(spaces)

    def last_reports(self, saves: Iterable[int]) -> Reports | None:
        return Legacy.take(self.path)

    def open_plane(self, rank: int, caches: Caches) -> tuple[list[torch.Tensor], ripieno.Pool]:
        options, world = self.connector.options, self.connector.world
        part, copy = divmod(rank, self.connector.copies)
        move_to_pages(self.connector, any_of(caches))
        pages, pool = register(self.connector, caches)
        first = self.connector._vllm_config.parallel_config.data_parallel_index * world
        given = options.plane(first + rank) | {"copies": self.connector.copies, "copy": copy}
        plane = ripieno.Plane(self.path, self.ranks[part], self.connector.shape, pool, **given)
        self.plane = self.own = plane
        self.is_paced = options.is_paced
        self.paced = plane if options.is_paced else None
        return pages, pool

    def join(self, job: int, layer: int, stream: Stream) -> None:
        wait = self.own.join if stream else self.own.wait
        wait(job, layer, *stream)

    def forget(self, files: list[int]) -> None:
        self.own.forget(files)

    def leave(self, rank: int, reports: Reports) -> None:
        try:
            Legacy.leave(self.path, rank, reports)
        except OSError as error:
            logger.error("ripieno: rank %d: what ended last is not known: %s", rank, error)
        used = {name: value for name, value in self.own.stats().items() if value}
        logger.info("ripieno: rank %d: %s", rank, used)


class ServedStore(Place):
    """The store of a server, which has the drives, and the checksums. It reads nothing ahead, and
    knows no steps."""

    gives_up = False

    def __init__(self, connector: RipienoConnector, server: str) -> None:
        self.connector, self.path = connector, server
        self.known: dict[int, dict[bytes, None]] = {}
        """By namespace: keys of which events told. The first ones are asked for next."""
        self.asks_at = 0.0

    def open_catalog(self) -> Catalog:
        engine, ranks, shape = self.connector.engine, self.connector.ranks, self.connector.shape
        self.catalog = ripieno.ServedCatalog(self.path, shape, engine=engine, ranks=ranks)
        return self.catalog

    def announced(self, space: int, keys: Sequence[bytes]) -> None:
        self.known.setdefault(space, {}).update(dict.fromkeys(keys))

    def take_dropped(self, spaces: Sequence[int]) -> list[bytes]:
        # The server does not say it by itself: a part of the keys is asked for once a second.
        dropped: list[bytes] = []
        if time.monotonic() < self.asks_at:
            return dropped
        self.asks_at = time.monotonic() + ASK_SECONDS
        for space, known in self.known.items():
            keys = list(islice(known, ASK_KEYS))
            flags = self.catalog.are_stored(space, keys)
            if self.catalog.stats().files == 0:
                # The server is away, and has all of them when it is back.
                break
            for key, is_stored in zip(keys, flags, strict=True):
                del known[key]
                if is_stored:
                    known[key] = None
                else:
                    dropped.append(key)
        return dropped

    def last_reports(self, saves: Iterable[int]) -> Reports | None:
        # The server knows which of them the ranks have stored.
        ranks = range(self.connector.ranks)
        return Reports(written={job: dict.fromkeys(ranks, b"") for job in saves})

    def open_plane(self, rank: int, caches: Caches) -> tuple[list[torch.Tensor], ripieno.Pool]:
        cache, shape = any_of(caches), self.connector.shape
        # The server maps memory of a GPU as it is.
        shared = None if cache.is_cuda else move_to_shared(self.connector, cache)
        pages, pool = register(self.connector, caches)
        if shared:
            pool = replace(pool, file=shared.file)
        number, copy = divmod(rank, self.connector.copies)
        part = {"ranks": self.connector.ranks, "rank": number, "copy": copy}
        engine = self.connector.engine
        self.plane = ripieno.ServedPlane(self.path, shape, pool, engine=engine, **part)
        self.is_paced = self.plane.is_paced
        return pages, pool


def any_of(caches: Caches) -> torch.Tensor:
    """Returns a tensor of the KV cache."""
    first = next(iter(caches.values()))
    return first if isinstance(first, torch.Tensor) else first[0]
