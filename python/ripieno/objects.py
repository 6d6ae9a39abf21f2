"""Objects of any size in a store, for caches that keep theirs in host memory: docs/start/objects.md.

An object is stored in pieces of the same size, and found when all of its pieces are. Pieces are
copied through a buffer that the devices reach, because the objects have no common size and place.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import mmap
import os
import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, ClassVar

import ripieno
from ripieno import memory_of
from ripieno.capacity import made_in
from ripieno.options import Options as StoreOptions

THREADS = 2
"""Threads for each direction, with a part of the buffer each: one copies while the other moves."""

Batch = list[tuple[int, int]]
"""Pieces that are moved together: the object's position, and the piece's number in it."""


@dataclass(frozen=True)
class Options(StoreOptions):
    """Parameters of a store of objects; the modules that use it describe them."""

    OWN: ClassVar[set[str]] = StoreOptions.OWN | {"piece"}
    SIZES: ClassVar[set[str]] = StoreOptions.SIZES | {"piece", "buffer"}

    piece: int = 1 << 20
    buffer: int = 64 << 20
    weights_id: str = ""


@dataclass(frozen=True)
class Object:
    """An object, in the store and in memory."""

    space: ripieno.Store
    """A handle of its namespace."""
    keys: list[bytes]
    """Of its pieces."""
    size: int
    """Bytes."""
    address: int
    """Its first byte in memory; 0 if it is only looked up."""
    owner: Any = field(default=None, repr=False)
    """Object that keeps the memory alive."""

    @classmethod
    def named(
        cls, space: ripieno.Store, name: Sequence[Any], size: int, piece: int, address: int = 0
    ) -> Object:
        """Returns the object of a name, which is plain data, and a size."""
        digest = hashlib.sha256(json.dumps([*name, size]).encode()).digest()
        keys = [digest[:28] + at.to_bytes(4, "little") for at in range(-(-size // piece))]
        return cls(space, keys, size, address)


class Objects:
    """A store of objects. Threads may share it; each call uses a part of the buffer."""

    def __init__(
        self, options: Options, name: str, logger: logging.Logger, number: int = 0, of: int = 1
    ) -> None:
        """name: of the store in the directory. number, of: this process, of those that share the
        directory and its capacity."""
        self.logger = logger
        shape = ripieno.Shape(1, 1, options.piece, 1)
        if options.server:
            shape = ripieno.server_shape(options.server)
        self.piece = piece = shape.rows * shape.object_bytes
        """Bytes of a piece: a block of the store."""
        if piece == 0 or options.buffer < 2 * THREADS * piece:
            raise ValueError(
                f"buffer: {options.buffer} bytes were given; {2 * THREADS} pieces of {piece} bytes "
                "need more: give a larger buffer or a smaller piece"
            )
        size = options.buffer // piece * piece
        shared = ripieno.SharedMemory(size) if options.server else None
        self.memory = shared.buffer if shared else mmap.mmap(-1, size)
        """Pieces in flight."""
        pool = ripieno.Pool.contiguous(self.memory, shape)
        # A piece has the objects of all rows, one after the other.
        rows = [row * shape.object_bytes for row in range(shape.rows)]
        file = shared.file if shared else None
        pool = replace(pool, rows=rows, block_stride=piece, blocks=size // piece, file=file)

        def make(bytes: int) -> ripieno.Store:
            return ripieno.Store(self.path, shape, pool, capacity=bytes, **options.store)

        self.all: ripieno.Store
        """The store."""
        if options.server:
            self.path = options.server
            self.all = ripieno.Store.connect(options.server, shape, pool)
        else:
            name = f"{name}-piece{piece}" + (f"-dp{number}" if of > 1 else "")
            self.path = os.path.join(options.path, name)
            self.all = made_in(options.path, name, options.capacity, make, of)
        self.most = self.all.counts().files
        """Most pieces of an object: those of a larger one would evict all others, and each other."""
        parts, self.batch = 2 * THREADS, pool.blocks // (2 * THREADS)
        self.parts: queue.SimpleQueue[range] = queue.SimpleQueue()
        """Free parts of the buffer, as blocks."""
        for part in range(parts):
            self.parts.put(range(part * self.batch, (part + 1) * self.batch))
        self.dead: str | None = None
        """The reason if the store is no longer used, else None."""
        self.told: set[type[Exception]] = set()
        """Kinds of errors that were already logged."""

    @classmethod
    def open(cls, **options: Any) -> Objects:
        """Opens the store of a directory (path), which is made if it is not there, or of a server.
        options: see docs/start/objects.md."""
        return cls(Options.parse(options, "objects"), "objects", logging.getLogger(__name__))

    def named(self, name: str, buffer: Any) -> Object:
        """Returns the object of a name and a size: that of a writable, contiguous buffer (bytearray,
        numpy) or tensor on the CPU, from or to which it is copied."""
        address, owner, _, dimensions, each = memory_of(buffer)
        found = Object.named(self.all, [name], math.prod(dimensions) * each, self.piece, address)
        return replace(found, owner=owner)

    def are_stored(self, objects: Sequence[Object]) -> list[bool]:
        """Returns, for each object, True if it is stored; False if that cannot be known."""
        if self.dead:
            return [False] * len(objects)
        found = [True] * len(objects)
        for space, batch in self._batches(objects, range(len(objects))):
            try:
                stored = space.are_stored([objects[at].keys[number] for at, number in batch])
            except ripieno.Error as error:
                # It would end a scheduler of the engine.
                self.failed(error)
                stored = [False] * len(batch)
            for (at, _), is_stored in zip(batch, stored, strict=True):
                found[at] &= is_stored
        return found

    def store(self, objects: Sequence[Object]) -> list[int]:
        """Stores objects, and returns the positions of those that are new and complete: others
        were stored before, or had no room beside more useful ones."""
        new = [
            at
            for at, is_stored in enumerate(self.are_stored(objects))
            if not is_stored and len(objects[at].keys) <= self.most
        ]
        missing = {at: len(objects[at].keys) for at in new}
        for space, batch in self._batches(objects, new):
            with self._part() as part:
                for block, (at, number) in zip(part, batch, strict=False):
                    self._copy(objects[at], number, block, is_store=True)
                names = [objects[at].keys[number] for at, number in batch]
                with space.store(names, list(part[: len(batch)])) as request:
                    request.move_all()
                    accepted = request.commit()
            for at, _ in batch[:accepted]:
                missing[at] -= 1
        new = [at for at in new if not missing[at]]
        # Pieces of a later batch may have evicted others of this call.
        stored = self.are_stored([objects[at] for at in new])
        return list(compress(new, stored))

    def load(self, objects: Sequence[Object]) -> list[bool]:
        """Loads objects to their addresses. Returns which of them arrived; the memory of others
        may have been written, too."""
        arrived = [True] * len(objects)
        for space, batch in self._batches(objects, range(len(objects))):
            for (at, _), is_there in zip(batch, self._load(space, objects, batch), strict=True):
                arrived[at] &= is_there
        return arrived

    def _load(self, space: ripieno.Store, objects: Sequence[Object], batch: Batch) -> list[bool]:
        """Loads pieces. Returns which of them arrived."""
        names = [objects[at].keys[number] for at, number in batch]
        try:
            with self._part() as part, space.load(names, list(part[: len(batch)])) as request:
                request.move_all()
                for block, (at, number) in compress(zip(part, batch, strict=False), request.found):
                    self._copy(objects[at], number, block, is_store=False)
                return request.found
        except ripieno.Error as error:
            self.failed(error)
        each = [list(pieces) for _, pieces in groupby(batch, key=itemgetter(0))]
        if len(each) == 1:
            return [False] * len(batch)
        # One is damaged. The others may still arrive.
        return [is_there for one in each for is_there in self._load(space, objects, one)]

    def _batches(
        self, objects: Sequence[Object], chosen: Iterable[int]
    ) -> Iterator[tuple[ripieno.Store, Batch]]:
        """Yields the pieces of the chosen objects, of one namespace each, as many as fit into a
        part of the buffer."""
        spaces: dict[int, tuple[ripieno.Store, Batch]] = {}
        for at in chosen:
            space, count = objects[at].space, len(objects[at].keys)
            spaces.setdefault(id(space), (space, []))[1].extend((at, n) for n in range(count))
        for space, pieces in spaces.values():
            for first in range(0, len(pieces), self.batch):
                yield space, pieces[first : first + self.batch]

    @contextmanager
    def _part(self) -> Iterator[range]:
        """Yields a part of the buffer that nobody else uses."""
        part = self.parts.get()
        try:
            yield part
        finally:
            self.parts.put(part)

    def _copy(self, each: Object, number: int, block: int, is_store: bool) -> None:
        """Copies a piece of an object to a block of the buffer, or back."""
        piece = self.piece
        begin = number * piece
        buffer = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, block * piece))
        outside = each.address + begin
        size = min(piece, each.size - begin)
        # Python's lock is released meanwhile.
        target, source = (buffer, outside) if is_store else (outside, buffer)
        ctypes.memmove(target, source, size)
        if is_store:
            # The block has what was moved through it before, perhaps of another tenant, and is
            # stored whole.
            ctypes.memset(buffer + size, 0, piece - size)

    def failed(self, error: Exception) -> None:
        """Logs an error, and decides whether the store is used any longer."""
        if isinstance(error, ripieno.ClosedError | ripieno.ReadOnlyError):
            if not self.dead:
                self.dead = str(error)
                self.logger.error("ripieno: serving goes on without %s: %s", self.path, error)
        elif type(error) not in self.told:
            self.told.add(type(error))
            self.logger.warning("ripieno: %s (further ones of this kind are not logged)", error)

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the directory, or leaves the server."""
        try:
            self.logger.info("ripieno: %s", self.all.counts())
            self.all.close()
        except ripieno.Error as error:
            # Memory that a device may still reach stays mapped.
            self.logger.error("ripieno: %s", error)
