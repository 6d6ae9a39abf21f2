"""An L2 adapter for LMCache's server (0.5): KV cache on NVMe below its memory.

    --l2-adapter '{"type": "plugin", "module_path": "ripieno.lmcache", "class_name": "RipienoL2",
        "adapter_params": {"path": "/var/lib/kv", "capacity": "100GiB"}}'

Objects have any size: an object is stored in pieces of the same size, and found when all of its
pieces are. The store evicts the pieces that are least useful; LMCache is not asked to.

Parameters (adapter_params):
- path: a directory on a local file system with direct I/O, used by one process at a time.
- capacity: bytes of KV cache in the directory, such as "100GiB"; allocated immediately. A store
  keeps its size.
- piece: bytes of a piece, such as "1MiB". The last piece of an object is padded. "1MiB".
- devices: number of files, each with a software controller. 1.
- buffer: bytes of host memory through which pieces are copied. "64MiB".
- weights_id: distinguishes the weights from others of the same model name.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import ripieno
from ripieno.capacity import made_in

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = init_logger("lmcache.ripieno")

THREADS = 2
"""Threads for each direction, with a part of the buffer each: one copies while the other moves."""

Found = tuple[ripieno.Store, list[bytes]]
"""An object's namespace, and the keys of its pieces."""
Batch = list[tuple[int, int]]
"""Pieces that are moved together: the object's position, and the piece's number in it."""


@dataclass(frozen=True)
class Options:
    """Parameters of the adapter."""

    path: str
    capacity: int
    piece: int = 1 << 20
    devices: int = 1
    buffer: int = 64 << 20
    weights_id: str = ""

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Options:
        """Raises ValueError if a parameter is missing, unknown or wrong."""
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"adapter_params: {unknown} were given; there are {sorted(known)}")
        if missing := sorted({"path", "capacity"} - given.keys()):
            raise ValueError(f"adapter_params: {missing} are missing; give them")
        parsed = given | {"path": os.path.abspath(given["path"])}
        for name in {"capacity", "piece", "buffer"} & given.keys():
            parsed[name] = ripieno.parse_size(given[name], name)
        options = cls(**parsed)
        if options.piece == 0 or options.buffer < 2 * THREADS * options.piece:
            raise ValueError(
                f"buffer: {options.buffer} bytes were given; {2 * THREADS} pieces of "
                f"{options.piece} bytes need more: give a larger buffer or a smaller piece"
            )
        return options


class Known:
    """Sizes and salts of the objects that were ever stored: a file beside the store. A key of
    LMCache has no size, and a list of the salts is needed to report their usage."""

    def __init__(self, path: str) -> None:
        self.path, self.lock = path, threading.Lock()
        self.sizes: list[int] = []
        self.salts: list[str] = []
        if os.path.exists(path):
            with open(path) as file:
                self.sizes, self.salts = json.load(file)

    def add(self, sizes: Iterable[int], salts: Iterable[str]) -> None:
        """Returns when they are durable."""
        with self.lock:
            sizes = [*self.sizes, *sorted(set(sizes).difference(self.sizes))]
            salts = [*self.salts, *sorted(set(salts).difference(self.salts))]
            if (sizes, salts) == (self.sizes, self.salts):
                return
            with open(f"{self.path}.new", "w") as file:
                json.dump([sizes, salts], file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{self.path}.new", self.path)
            directory = os.open(os.path.dirname(self.path), os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
            self.sizes, self.salts = sizes, salts


class Tasks:
    """Tasks of one kind, and the event that says that some are done."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self.lock = threading.Lock()
        self.last = 0
        self.done: dict[int, Any] = {}

    def number(self) -> int:
        with self.lock:
            self.last += 1
            return self.last

    def end(self, task: int, result: Any) -> None:
        with self.lock:
            self.done[task] = result
        self.event.notify()

    def take(self, task: int) -> Any:
        with self.lock:
            return self.done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self.lock:
            done, self.done = self.done, {}
            return done


class RipienoL2(L2AdapterInterface):
    """See the module's documentation. LMCache calls it from several threads."""

    def __init__(
        self, adapter_params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        # 0: the store evicts by itself.
        super().__init__(max_capacity_bytes=0)
        options = self.options = Options.parse(adapter_params)
        name = f"lmcache-piece{options.piece}"
        self.path = os.path.join(options.path, name)
        shape = ripieno.Shape(1, 1, options.piece, 1)
        self.memory = mmap.mmap(-1, options.buffer // options.piece * options.piece)
        """Pieces in flight."""
        pool = ripieno.Pool.contiguous(self.memory, shape)

        def make(bytes: int) -> ripieno.Store:
            return ripieno.Store(self.path, shape, pool, capacity=bytes, devices=options.devices)

        self.store = made_in(options.path, name, options.capacity, make)
        self.known = Known(os.path.join(self.path, "objects.json"))
        self.spaces: dict[str, ripieno.Store] = {}
        """By salt: a handle of its namespace."""
        self.held: defaultdict[ObjectKey, list[ripieno.Held]] = defaultdict(list)
        """Locks of objects."""
        self.lock = threading.Lock()
        """Guards spaces and held."""
        parts, self.batch = 2 * THREADS, pool.blocks // (2 * THREADS)
        self.parts: queue.SimpleQueue[range] = queue.SimpleQueue()
        """Free parts of the buffer, as blocks."""
        for part in range(parts):
            self.parts.put(range(part * self.batch, (part + 1) * self.batch))
        self.stores, self.lookups, self.loads = Tasks(), Tasks(), Tasks()
        self.storer = ThreadPoolExecutor(THREADS, "ripieno-store")
        self.loader = ThreadPoolExecutor(THREADS, "ripieno-load")
        self.dead: str | None = None
        """The reason if the store is no longer used, else None."""
        self.told: set[type[Exception]] = set()
        """Kinds of errors that were already logged."""
        used = self.get_usage().total_bytes_used
        logger.info("ripieno: %d bytes are stored in %s", used, self.path)

    def get_store_event_fd(self) -> int:
        return int(self.stores.event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self.lookups.event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self.loads.event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self.stores.number()
        self._submit(self.storer, self.stores, task, L2StoreResult(False, 0), self._store)(
            keys, objects
        )
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self.stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task, found = self.lookups.number(), Bitmap(len(keys))
        for at, key in enumerate(keys):
            if held := self._hold(key):
                found.set(at)
                with self.lock:
                    self.held[key].append(held)
        self.lookups.end(task, found)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self.lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            with self.lock:
                locks = self.held.get(key)
                held = locks.pop() if locks else None
                if locks is not None and not locks:
                    del self.held[key]
            if held:
                held.end()

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self.loads.number()
        self._submit(self.loader, self.loads, task, Bitmap(len(keys)), self._load)(keys, objects)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self.loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            for size in self.known.sizes:
                space, pieces = self._found(key, size)
                try:
                    removed = space.remove(pieces)
                except ripieno.Error as error:
                    self._failed(error)
                    return
                if removed:
                    self._notify_keys_deleted([key], [size])

    def get_usage(self) -> AdapterUsage:
        """Returns what the store holds, also of earlier processes, in bytes of its pieces."""
        piece = self.options.piece
        used = {salt: self._space(salt).usage().stored * piece for salt in self.known.salts}
        return AdapterUsage(
            total_bytes_used=sum(used.values()),
            total_capacity_bytes=self.store.stats().files * piece,
            bytes_by_cache_salt=MappingProxyType({k: v for k, v in used.items() if v}),
        )

    def report_status(self) -> dict[str, Any]:
        locked = sum(map(len, self.held.values()))
        status = {"is_healthy": not self.dead, "type": "RipienoL2", "path": self.path}
        return status | {"locked": locked, "problem": self.dead}

    def close(self) -> None:
        """Ends what was submitted, and releases the directory."""
        self.storer.shutdown()
        self.loader.shutdown()
        with self.lock:
            held, self.held = (
                [each for all in self.held.values() for each in all],
                defaultdict(list),
            )
        for each in held:
            each.end()
        try:
            logger.info("ripieno: %s", self.store.stats())
            self.store.close()
        except ripieno.Error as error:
            # Memory that a device may still reach stays mapped.
            logger.error("ripieno: %s", error)
        for tasks in (self.stores, self.lookups, self.loads):
            tasks.event.close()

    def _space(self, salt: str) -> ripieno.Store:
        """Returns a handle of a salt's namespace."""
        with self.lock:
            if salt not in self.spaces:
                weights = hashlib.sha256(self.options.weights_id.encode()).digest()
                namespace = ripieno.Namespace(weights, "lmcache", tenant_salt=salt.encode())
                self.spaces[salt] = self.store.within(namespace)
            return self.spaces[salt]

    def _found(self, key: ObjectKey, size: int) -> Found:
        """Returns the pieces of an object of this size."""
        named = [key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash.hex(), size]
        digest = hashlib.sha256(json.dumps(named).encode()).digest()
        count = -(-size // self.options.piece)
        pieces = [digest[:28] + at.to_bytes(4, "little") for at in range(count)]
        return self._space(key.cache_salt), pieces

    def _hold(self, key: ObjectKey) -> ripieno.Held | None:
        """Returns a lock of an object, or None if it is not stored."""
        if self.dead or key.cache_salt not in self.known.salts:
            return None
        try:
            for size in self.known.sizes:
                space, pieces = self._found(key, size)
                held = space.hold(pieces) if space.lookup(pieces) == len(pieces) else None
                if held and held.blocks == len(pieces):
                    return held
                if held:
                    held.end()
        except ripieno.Error as error:
            self._failed(error)
        return None

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        tasks: Tasks,
        task: int,
        nothing: Any,
        act: Callable[[Sequence[ObjectKey], Sequence[MemoryObj]], Any],
    ) -> Callable[[Sequence[ObjectKey], Sequence[MemoryObj]], object]:
        """Returns a function that has a thread act; `nothing` is the result if that fails."""

        def run(keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
            result = nothing
            try:
                if not self.dead:
                    result = act(keys, objects)
            except Exception as error:
                # LMCache waits for each task.
                self._failed(error)
            tasks.end(task, result)

        return lambda keys, objects: threads.submit(run, keys, objects)

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        sizes = [_size(each) for each in objects]
        self.known.add(sizes, {key.cache_salt for key in keys})
        found = [self._found(key, size) for key, size in zip(keys, sizes, strict=True)]
        new = [at for at, (space, names) in enumerate(found) if space.lookup(names) < len(names)]
        missing = {at: len(found[at][1]) for at in new}
        for space, batch in self._batches(found, new):
            with self._part() as part:
                for block, (at, number) in zip(part, batch, strict=False):
                    self._copy(objects[at], number, block, is_store=True)
                names = [found[at][1][number] for at, number in batch]
                with space.store(names, list(part[: len(batch)])) as request:
                    request.move_all()
                    accepted = request.commit()
            for at, _ in batch[:accepted]:
                missing[at] -= 1
        # The others had no room beside more useful ones.
        stored = [at for at in new if not missing[at]]
        self._notify_keys_stored([keys[at] for at in stored], [sizes[at] for at in stored])
        return L2StoreResult(True, sum(sizes[at] for at in stored))

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        found = [self._found(key, _size(each)) for key, each in zip(keys, objects, strict=True)]
        bad: set[int] = set()
        for space, batch in self._batches(found, range(len(keys))):
            if not self._load_all(space, found, batch, objects):
                # One piece was evicted or is damaged. The other objects may still be stored.
                for at, pieces in groupby(batch, key=itemgetter(0)):
                    if not self._load_all(space, found, list(pieces), objects):
                        bad.add(at)
        loaded = Bitmap(len(keys))
        for at in range(len(keys)):
            if at not in bad:
                loaded.set(at)
        self._notify_keys_accessed([key for at, key in enumerate(keys) if at not in bad])
        return loaded

    def _load_all(
        self, space: ripieno.Store, found: list[Found], batch: Batch, objects: Sequence[MemoryObj]
    ) -> bool:
        names = [found[at][1][number] for at, number in batch]
        try:
            with self._part() as part, space.load(names, list(part[: len(batch)])) as request:
                if request.blocks < len(batch):
                    return False
                request.move_all()
                for block, (at, number) in zip(part, batch, strict=False):
                    self._copy(objects[at], number, block, is_store=False)
                return True
        except ripieno.Error as error:
            self._failed(error)
            return False

    def _batches(
        self, found: list[Found], chosen: Iterable[int]
    ) -> Iterator[tuple[ripieno.Store, Batch]]:
        """Yields the pieces of the chosen objects, of one namespace each, as many as fit into a
        part of the buffer."""
        spaces: dict[int, tuple[ripieno.Store, Batch]] = {}
        for at in chosen:
            space, names = found[at]
            spaces.setdefault(id(space), (space, []))[1].extend((at, n) for n in range(len(names)))
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

    def _copy(self, each: MemoryObj, number: int, block: int, is_store: bool) -> None:
        """Copies a piece of an object to a block of the buffer, or back."""
        piece = self.options.piece
        begin = number * piece
        buffer = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, block * piece))
        outside = int(each.data_ptr) + begin
        # Python's lock is released meanwhile.
        target, source = (buffer, outside) if is_store else (outside, buffer)
        ctypes.memmove(target, source, min(piece, _size(each) - begin))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ripieno.ClosedError | ripieno.ReadOnlyError):
            if not self.dead:
                self.dead = str(error)
                logger.error("ripieno: serving goes on without %s: %s", self.path, error)
        elif type(error) not in self.told:
            self.told.add(type(error))
            logger.warning("ripieno: %s (further ones of this kind are not logged)", error)


def _size(each: MemoryObj) -> int:
    return len(each.byte_array)
