"""The store of a server (`ripieno serve`), with those calls of ripieno.Store that `objects` makes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ripieno

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ServedStore:
    """A handle of a server's store in one namespace. While the server is away, nothing is found and
    there is no room; it is connected to again when it is back."""

    catalog: ripieno.ServedCatalog
    plane: ripieno.ServedPlane
    layers: int
    space: int

    @classmethod
    def connect(cls, socket: str, shape: ripieno.Shape, pool: ripieno.Pool) -> Self:
        engine = uuid.uuid4().hex
        catalog = ripieno.ServedCatalog(socket, shape, engine=engine)
        plane = ripieno.ServedPlane(socket, shape, pool, engine=engine)
        return cls(catalog, plane, shape.layers, catalog.namespace(ripieno.Namespace()))

    def within(self, namespace: ripieno.Namespace) -> ServedStore:
        space = self.catalog.namespace(namespace)
        return ServedStore(self.catalog, self.plane, self.layers, space)

    def lookup(self, keys: Sequence[bytes]) -> int:
        return self.catalog.lookup(self.space, keys)

    def hold(self, keys: Sequence[bytes]) -> ServedHeld:
        return ServedHeld(self, self.catalog.acquire(self.space, keys))

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> ServedLoad:
        return ServedLoad(self, self.catalog.acquire(self.space, keys), blocks)

    def store(self, keys: Sequence[bytes], blocks: Sequence[int]) -> ServedSave:
        return ServedSave(self, self.catalog.begin(self.space, keys), blocks)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self.catalog.remove(self.space, keys)

    def clear(self) -> None:
        raise ripieno.InvalidError("other engines use these blocks; clear them by `ripieno ctl`")

    def usage(self) -> ripieno.Usage:
        return self.catalog.usage(self.space)

    def stats(self) -> ripieno.CatalogStats:
        return self.catalog.stats()

    def sync(self) -> None:
        self.catalog.sync()

    def close(self) -> None:
        self.plane.close()
        self.catalog.close()

    def move(self, job: int) -> None:
        """Moves all layers of a job, and ends it: nothing accesses its blocks then."""
        try:
            self.plane.start(job, 0, layers=self.layers)
        finally:
            (report,) = self.plane.end([job])
        if report.error:
            raise ripieno.TransferError(report.error)


@dataclass(frozen=True)
class ServedHeld:
    """Blocks that are not evicted before the end."""

    of: ServedStore
    found: ripieno.Reference

    @property
    def blocks(self) -> int:
        return len(self.found.files)

    def end(self) -> None:
        self.of.catalog.release(self.found.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@dataclass(frozen=True)
class ServedLoad(ServedHeld):
    """Blocks that are loaded."""

    into: Sequence[int]

    def move_all(self) -> None:
        into = list(self.into[: self.blocks])
        self.of.move(self.of.plane.begin_load(self.found.files, into))


@dataclass(frozen=True)
class ServedSave:
    """Blocks that are stored, if they are committed."""

    of: ServedStore
    write: ripieno.Write
    blocks: Sequence[int]

    def move_all(self) -> None:
        blocks = [self.blocks[at] for at in self.write.positions]
        self.of.move(self.of.plane.begin_store(self.write.files, blocks))
        self.of.catalog.written(self.write.id, 0, b"")

    def commit(self) -> int:
        """Returns how many leading blocks are stored: 0 if the server was lost meanwhile."""
        is_stored = self.of.catalog.commit(self.write.id, durable=True)
        return self.write.accepted if is_stored else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After a commit, nothing is left to end.
        self.of.catalog.abort(self.write.id)
