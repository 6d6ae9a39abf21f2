"""An L2 adapter for LMCache's server (0.5): KV cache on NVMe below its memory.

    --l2-adapter '{"type": "plugin", "module_path": "ripieno.lmcache", "class_name": "RipienoL2",
        "adapter_params": {"path": "/var/lib/kv", "capacity": "100GiB"}}'

Objects have any size: an object is stored in pieces of the same size, and found when all of its
pieces are. The store evicts the pieces that are least useful; LMCache is not asked to.

The parameters (adapter_params) are in docs/start/lmcache.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.utils import get_size_bytes
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import ripieno
from ripieno import side_files
from ripieno.objects import THREADS, Object, Objects, Options

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, MemoryTags, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

logger = init_logger("lmcache.ripieno")


class Known:
    """Sizes and salts of the objects that were ever stored: a file beside the store. A key of
    LMCache has no size, and only salts that were stored before are looked up.

    A salt keeps others out, and is its user's secret: the file has its digest."""

    def __init__(self, path: str | None) -> None:
        """path: None without a file, where a server has the objects of others, too. Then sizes are
        those of LMCache's layouts, and salts those of this process."""
        self.path, self.lock = path, threading.Lock()
        self.sizes: list[int] = []
        self.salts: dict[str, str | None] = {}
        """By digest: the salt, or None if this process has not seen it."""
        self.takes_all = path is None
        """True to take over what is looked up, because others stored it, or the file was lost."""
        if path:
            self._read(path)

    def _read(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                sizes, digests, *lost = json.load(file)
            if not all(type(size) is int and 0 < size < 1 << 63 for size in sizes):
                raise ValueError("a size is none")
            if not all(len(bytes.fromhex(digest)) == len(NO_SALT) // 2 for digest in digests):
                raise ValueError("the digest of a salt is none")
        except FileNotFoundError:
            return
        except (ValueError, TypeError, RecursionError) as error:
            self.takes_all = True
            logger.warning(
                "ripieno: %s is damaged (%s), and is written anew. The objects are not lost: those "
                "of a size and a salt that LMCache asks for again are found. Until then they are "
                "not in the usage by salt, and are not deleted",
                path,
                error,
            )
        else:
            self.takes_all = lost == [True]
            self.sizes = sizes
            self.salts = {digest: "" if digest == NO_SALT else None for digest in digests}

    def add(self, sizes: Iterable[int], salts: Iterable[str]) -> None:
        """Returns when they are durable."""
        with self.lock:
            all_sizes = [*self.sizes, *sorted(set(sizes).difference(self.sizes))]
            all_salts = self.salts | {digest_of(salt): salt for salt in salts}
            is_new = len(all_sizes) > len(self.sizes) or len(all_salts) > len(self.salts)
            if self.path and is_new:
                side_files.write(self.path, [all_sizes, list(all_salts), self.takes_all])
            self.sizes, self.salts = all_sizes, all_salts


NO_SALT = "0" * 64
"""In place of a digest, for objects without a salt."""


def digest_of(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest() if salt else NO_SALT


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
        self.options = Options.parse(adapter_params, "adapter_params")
        self.objects = Objects(self.options, "lmcache", logger)
        try:
            self._start()
        except BaseException:
            # Otherwise this process has the directory until it ends.
            self.objects.close()
            raise

    def _start(self) -> None:
        is_own = not self.options.server
        self.known = Known(os.path.join(self.objects.path, "objects.json") if is_own else None)
        self.spaces: dict[str, ripieno.Store] = {}
        """By salt: a handle of its namespace."""
        self.held: defaultdict[ObjectKey, list[ripieno.Held]] = defaultdict(list)
        """Locks of objects."""
        self.lock = threading.Lock()
        """Guards spaces and held."""
        self.stores, self.lookups, self.loads = Tasks(), Tasks(), Tasks()
        self.storer = ThreadPoolExecutor(THREADS, "ripieno-store")
        self.loader = ThreadPoolExecutor(THREADS, "ripieno-load")
        used = self.get_usage().total_bytes_used
        logger.info("ripieno: %d bytes are stored in %s", used, self.objects.path)

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
        if self.known.takes_all:
            sizes = {get_size_bytes(it.shapes, it.dtypes) for it in group_layout_descs.values()}
            self.known.add(sizes, {key.cache_salt for key in keys})
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

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Counts as a use of objects that LMCache has in its memory (from 0.5.7 on). Otherwise the
        store would evict what is used too often to be loaded."""
        for key in keys:
            if held := self._hold(key):
                held.end()
        self._notify_keys_accessed(keys)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task = self.loads.number()
        self._submit(self.loader, self.loads, task, Bitmap(len(keys)), self._load)(keys, objects)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self.loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            for size in self.known.sizes:
                try:
                    found = self._found(key, size)
                    removed = found.space.remove(found.keys)
                except ripieno.Error as error:
                    self.objects.failed(error)
                    break
                if removed:
                    self._notify_keys_deleted([key], [size])

    def get_usage(self) -> AdapterUsage:
        """Returns what the store holds, in bytes of its pieces: by salt, of those that this process
        has seen; in all, also of earlier processes, or of those salts alone if the store is a
        server's."""
        piece = self.objects.piece
        used = {}
        for salt in [salt for salt in self.known.salts.values() if salt is not None]:
            try:
                used[salt] = self._space(salt).usage().stored * piece
            except ripieno.Error as error:
                # A server has no more namespaces for this process.
                self.objects.failed(error)
        files = stored = 0
        try:
            counts = self.objects.all.counts()
            files, stored = counts.files, counts.stored
        except ripieno.Error as error:
            self.objects.failed(error)
        return AdapterUsage(
            total_bytes_used=sum(used.values()) if self.options.server else stored * piece,
            total_capacity_bytes=files * piece,
            bytes_by_cache_salt=MappingProxyType({k: v for k, v in used.items() if v}),
        )

    def get_memory_tags(self) -> MemoryTags:
        """Returns that the bytes are on storage of this host. LMCache asks from 0.5.7 on, which has
        these names, and then makes no adapter without an answer."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.LOCAL)

    def report_status(self) -> dict[str, Any]:
        locked = sum(map(len, self.held.values()))
        dead, path = self.objects.dead, self.objects.path
        status = {"is_healthy": not dead, "type": "RipienoL2", "path": path}
        return status | {"locked": locked, "problem": dead}

    def close(self) -> None:
        """Ends what was submitted, and releases the directory, or leaves the server."""
        self.storer.shutdown()
        self.loader.shutdown()
        with self.lock:
            held, self.held = (
                [each for all in self.held.values() for each in all],
                defaultdict(list),
            )
        for each in held:
            each.end()
        self.objects.close()
        for tasks in (self.stores, self.lookups, self.loads):
            tasks.event.close()

    def _space(self, salt: str) -> ripieno.Store:
        """Returns a handle of a salt's namespace."""
        with self.lock:
            if salt not in self.spaces:
                weights = hashlib.sha256(self.options.weights_id.encode()).digest()
                begin = hashlib.sha256(salt.encode()).hexdigest()[:8]
                label = f"lmcache salt {begin}" if salt else "lmcache"
                namespace = ripieno.Namespace(
                    weights, "lmcache", tenant_salt=salt.encode(), label=label
                )
                self.spaces[salt] = self.objects.all.within(namespace)
            return self.spaces[salt]

    def _found(self, key: ObjectKey, size: int, address: int = 0) -> Object:
        """Returns the object of a key, if it has this size."""
        name = [key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash.hex()]
        return Object.named(self._space(key.cache_salt), name, size, self.objects.piece, address)

    def _hold(self, key: ObjectKey) -> ripieno.Held | None:
        """Returns a lock of an object, or None if it is not stored."""
        if self.objects.dead or digest_of(key.cache_salt) not in self.known.salts:
            return None
        try:
            for size in self.known.sizes:
                found = self._found(key, size)
                (has,) = self.objects.are_stored([found])
                held = found.space.hold(found.keys) if has else None
                if held and held.blocks == len(found.keys):
                    return held
                if held:
                    held.end()
        except ripieno.Error as error:
            self.objects.failed(error)
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
                if not self.objects.dead:
                    result = act(keys, objects)
            except Exception as error:
                # LMCache waits for each task.
                self.objects.failed(error)
            tasks.end(task, result)

        return lambda keys, objects: threads.submit(run, keys, objects)

    def _placed(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[Object]:
        return [
            self._found(key, _size(each), int(each.data_ptr))
            for key, each in zip(keys, objects, strict=True)
        ]

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        sizes = [_size(each) for each in objects]
        self.known.add(sizes, {key.cache_salt for key in keys})
        stored = self.objects.store(self._placed(keys, objects))
        self._notify_keys_stored([keys[at] for at in stored], [sizes[at] for at in stored])
        return L2StoreResult(True, sum(sizes[at] for at in stored))

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        arrived = self.objects.load(self._placed(keys, objects))
        loaded = Bitmap(len(keys))
        for at in range(len(keys)):
            if arrived[at]:
                loaded.set(at)
        self._notify_keys_accessed(list(compress(keys, arrived)))
        return loaded


def _size(each: MemoryObj) -> int:
    return len(each.byte_array)
