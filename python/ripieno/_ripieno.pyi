import os
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, final

from . import Namespace, Pool, RankId, Shape
from .stats import CatalogStats, PlaneStats, StoreStats, Usage

__all__ = [
    "METRICS",
    "Catalog",
    "Held",
    "Plane",
    "Reference",
    "Report",
    "Request",
    "ServedCatalog",
    "ServedPlane",
    "Store",
    "Write",
    "end_events",
    "parse_size",
    "prepare",
    "server_shape",
    "set_event_level",
    "take_events",
]

METRICS: list[tuple[str, str, str]]
"""Name, type and meaning of each metric of a store."""

_Keys = bytes | Sequence[bytes]
"""32 bytes each, or all of them concatenated."""

@final
class Reference:
    """Blocks that were found: they are not evicted until the reference is released."""
    @property
    def id(self) -> int:
        """Identifies the reference to release()."""
    @property
    def files(self) -> list[int]:
        """The file of each key found, in order."""

@final
class Write:
    """Files for new blocks."""
    @property
    def id(self) -> int:
        """Identifies the write in written(), failed(), commit() and abort()."""
    @property
    def accepted(self) -> int:
        """Number of leading keys that lookups will find after the commit."""
    @property
    def positions(self) -> list[int]:
        """Positions, among these, of the keys whose blocks are to be written."""
    @property
    def files(self) -> list[int]:
        """The files to write them to."""
    @property
    def is_short(self) -> bool:
        """True if more keys would have been accepted with more free files."""

@final
class Report:
    """Result of a job."""
    @property
    def job(self) -> int:
        """The job."""
    @property
    def error(self) -> str | None:
        """The error if any of the data did not arrive, or is not durable; None on success."""
    @property
    def is_mismatch(self) -> bool:
        """True if the error is a checksum mismatch: the data read is not the data stored."""
    @property
    def checksums(self) -> bytes:
        """Checksums of the stored data, to be passed to Catalog.written()."""

class _Context:
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Catalog(_Context):
    """The scheduler's half of a store: keys, files and references, with the journal. The data
    belongs to the planes of the workers. Opens the catalog of the store that prepare() created in
    this directory. Once the journal has failed, changes that it would record raise
    ReadOnlyError."""
    def __new__(cls, path: str | os.PathLike[str]) -> Catalog: ...
    def __enter__(self) -> Catalog: ...
    def rank(self, rank: int) -> RankId:
        """Returns a rank's identity, which opens its plane. Send it to its worker."""
    def namespace(self, namespace: Namespace) -> int:
        """Returns the number of a namespace, and registers it if it is new. It is valid until the
        catalog is closed."""
    def lookup(self, namespace: int, keys: _Keys) -> int:
        """Returns how many leading keys are stored. Has no side effects, and never blocks."""
    def are_stored(self, namespace: int, keys: _Keys) -> bytes:
        """Returns a byte for each key: 1 if it is stored, else 0. Has no side effects, and never
        blocks."""
    def files(self, namespace: int, keys: _Keys) -> list[int]:
        """Returns the files of the longest stored prefix of the keys, for Plane.prefetch. Takes no
        reference: the files may be reused immediately."""
    def acquire(self, namespace: int, keys: _Keys) -> Reference:
        """Looks up the longest stored prefix of the keys, and references it until it is
        released."""
    def release(self, reference: int) -> None:
        """Releases a reference. Call it when all ranks have reported."""
    def checksums(self, files: Sequence[int], rank: int) -> bytes:
        """Returns the checksums of these files' objects on a rank, for Plane.begin_load. The files
        must be referenced."""
    def begin(self, namespace: int, keys: _Keys) -> Write:
        """Allocates files for new blocks. Pass the whole prefix, including the stored part."""
    def written(self, write: int, rank: int, checksums: bytes) -> bool | None:
        """Records that a rank has written and flushed its part, with the checksums of its report.
        Returns None while other ranks have not reported, True if the write can be committed, and
        False if it has ended because a rank failed."""
    def failed(self, write: int, rank: int) -> bool | None:
        """Records that a rank failed to write its part, and that none of it is in flight. Returns
        the same as written()."""
    def commit(self, write: int) -> bool:
        """Makes the blocks of a write visible to lookups. They are durable after the next sync().
        Returns True."""
    def abort(self, write: int) -> None:
        """Ends a write that has nothing in flight on any rank. None of it becomes visible."""
    def lost(self, files: Sequence[int]) -> None:
        """Marks files that a plane could not read: their keys are misses from now on."""
    def pin(
        self,
        namespace: int,
        keys: _Keys,
        seconds: int,
        *,
        bytes_max: int | None = None,
        wait: bool = False,
    ) -> tuple[str, str | None, int | None]:
        """Protects the leading ones of these keys that are stored from eviction, for so many seconds,
        until their namespace is cleared, or the catalog closed. bytes_max: a limit of their bytes.
        wait: the others are protected when they are stored. Returns the outcome (accepted, clipped,
        deferred, rejected or missing), the reason of another than the first, and the pin's
        number."""
    def unpin(self, pin: int) -> bool:
        """Ends a pin. Returns False if there is none with this number, or not any more."""
    def remove(self, namespace: int, keys: _Keys) -> int:
        """Drops those of these keys that are stored. Returns their number."""
    def take_dropped(self, namespaces: Sequence[int]) -> list[bytes]:
        """Returns the keys of these namespaces that were evicted, removed or lost since the last
        call; not those dropped by clear() and bump_epoch(). They are collected from the first call
        on. Keys of other namespaces are discarded."""
    def clear(self, namespace: int) -> None:
        """Drops all blocks of a namespace."""
    def evict(self, files: int, namespace: int | None = None) -> int:
        """Evicts up to this many files, of one namespace or of all. Returns the number evicted."""
    def bump_epoch(self, namespace: int) -> int:
        """Permanently drops all blocks of a namespace, including those being written. Returns the
        new epoch."""
    def set_quota(self, namespace: int, files: int | None) -> None:
        """Limits a namespace to this many files; None: no limit."""
    def usage(self, namespace: int) -> Usage:
        """Returns the namespace's counts."""
    def stats(self) -> CatalogStats:
        """Returns the counts of all namespaces."""
    def sync(self) -> None:
        """Makes all earlier commits, evictions, pins and clears durable. Lookups of other threads
        do not wait for it."""
    def close(self) -> None:
        """Makes all changes durable, and releases the directory. Every later call raises
        ClosedError, except another close(). In a forked process every call raises it, and close()
        does nothing."""

@final
class Plane(_Context):
    """The data of one rank: its devices and its registered memory. Moves files by number, layer by
    layer.

    Opens the plane of a rank of the store that prepare() created in this directory. rank: the
    result of Catalog.rank() or prepare() for it. Opening uses part of the pool for tests and
    restores its contents.

    pacing: True to start layers by need instead of in the order of the calls: loads before stores,
    and reading ahead for announced requests while nothing else moves; a thread decides.

    executor: runs the I/O kernel on host (threads) or cuda (the GPU, on io_sms SMs: 4); None: cuda
    if the pool is on a GPU. require: the data path (direct, staged or host); None: the best that
    works. dram_bytes, dram_mode, metrics: same as for Store.
    """
    def __new__(
        cls,
        path: str | os.PathLike[str],
        rank: RankId,
        shape: Shape,
        pool: Pool,
        *,
        executor: Literal["host", "cuda"] | None = None,
        require: Literal["direct", "staged", "host"] | None = None,
        io_sms: int | None = None,
        dram_bytes: int | str | None = None,
        dram_mode: Literal["write-through", "read-ahead"] = "write-through",
        pacing: bool = False,
        metrics: str | None = None,
    ) -> Plane: ...
    def __enter__(self) -> Plane: ...
    @property
    def is_bounced(self) -> bool:
        """True if the CPU copies blocks, because the devices cannot address their memory."""
    @property
    def route(self) -> str:
        """The data path: direct, staged or host."""
    @property
    def placement(self) -> str:
        """Describes the data path: where queues and pool are, and why no better path is taken."""
    def begin_store(self, files: Sequence[int], blocks: Sequence[int]) -> int:
        """Prepares to store blocks of the pool in files. Returns the job."""
    def begin_load(
        self,
        files: Sequence[int],
        blocks: Sequence[int],
        checksums: bytes | None = None,
        *,
        request: int = 0,
        step: int | None = None,
    ) -> int:
        """Prepares to load files into blocks of the pool. checksums: the result of
        Catalog.checksums() for these files; a mismatch fails the job. Returns the job.

        With pacing: step, as given to begin_step(), if its layers need the data; else it is needed
        as soon as is fair to the other requests. request: the number of the request that it is for.
        """
    def begin_step(self, step: int) -> None:
        """Announces a step of the engine, whose number is larger than those before it."""
    def end_step(self, step: int, seconds: float) -> None:
        """Ends a step, which took this many seconds."""
    def hurry(self, job: int) -> None:
        """Starts the layers of a job that wait for their turn, and later ones at once."""
    def announce(
        self,
        request: int,
        files: Sequence[int],
        checksums: bytes | None = None,
        steps: int = 1,
    ) -> None:
        """Announces a request that will load these files after about this many steps. With pacing
        and dram_bytes, they are read into that memory in time, as long as that delays nothing else.
        Calling it again updates the time, and retries files that were late or found no room.
        checksums: same as for begin_load()."""
    def withdraw(self, request: int, runs: bool) -> None:
        """Ends reading ahead for an announced request, which runs now or else was aborted."""
    def start(self, job: int, layer: int, stream: int | None = None) -> None:
        """Starts a layer of a job. Blocks while the maximum number of layers is in flight; with
        pacing, it waits for its turn instead.

        stream: the handle of a CUDA stream of the pool's GPU
        (torch.cuda.current_stream().cuda_stream): the layer's blocks are not accessed before all
        work enqueued there so far is done. It must not be destroyed before the plane is closed.
        """
    def join(self, job: int, layer: int, stream: int) -> None:
        """Makes later work on a CUDA stream wait for a layer that was started, and returns
        immediately. The stream continues even if the layer fails: end() reports the failure."""
    def wait(self, job: int, layer: int) -> None:
        """Waits for a layer that was started. Raises TransferError if it failed; then the contents
        of the layer's blocks are undefined. Either way, no transfer uses them any more."""
    def poll(self, job: int, layer: int) -> bool:
        """Same as wait(), without blocking: False while the layer is in flight."""
    def end(self, jobs: Sequence[int]) -> list[Report]:
        """Ends jobs: waits for their layers in flight, and flushes the devices once for all stores
        among them. A layer that was never started is an error of its job. After a failed flush, all
        storing jobs have an error, and begin_store() raises ReadOnlyError: open the plane again."""
    def take_lost(self) -> list[int]:
        """Returns the files that could not be read, or whose checksums did not match, since the
        last call: for Catalog.lost()."""
    def poll_events(self) -> list[tuple[int, str]]:
        """Returns the device events since the last call: pairs of the device's number and a word
        (requested, pcie-error, health, error, namespaces-changed, firmware-activating, paused,
        resumed, other). Calling it is optional: the plane reacts to events itself. When the owner
        of a drive wants it back (requested), it waits for transfers in flight and closes itself;
        later calls raise ClosedError."""
    def stats(self) -> PlaneStats:
        """Returns counters since opening."""
    def close(self) -> None:
        """Waits for transfers in flight, and releases the directory and the pool. Every later call
        raises ClosedError, except another close(). In a forked process every call raises it, and
        close() does nothing."""

@final
class Store(_Context):
    """A store in one process: keys, data and registered memory. Handles of one store share it, each
    in its own namespace. Dropping the last handle, request and hold of it closes it.

    Opens the store in a directory. With a capacity (in bytes or as "100GiB", allocated
    immediately), it is created first if there is none; devices: its number of files, each with a
    software controller. Opening uses part of the pool for tests and restores its contents.

    executor, io_sms, require, pacing: same as for Plane. dram_bytes: memory of this process that
    keeps copies of blocks above the devices, in bytes or as "8GiB". dram_mode: the blocks kept
    there: write-through (stored, loaded or prefetched), or read-ahead (only prefetched).

    metrics: serves counters for Prometheus at a port ("9400"), an IP address and a port, or a Unix
    socket's path with a /. Addresses that other machines reach begin with "public:".
    """
    def __new__(
        cls,
        path: str | os.PathLike[str],
        shape: Shape,
        pool: Pool,
        *,
        namespace: Namespace | None = None,
        capacity: int | str | None = None,
        devices: int = 1,
        executor: Literal["host", "cuda"] | None = None,
        require: Literal["direct", "staged", "host"] | None = None,
        io_sms: int | None = None,
        dram_bytes: int | str | None = None,
        dram_mode: Literal["write-through", "read-ahead"] = "write-through",
        pacing: bool = False,
        metrics: str | None = None,
    ) -> Store: ...
    def __enter__(self) -> Store: ...
    @property
    def placement(self) -> str:
        """Same as Plane.placement."""
    def within(self, namespace: Namespace) -> Store:
        """Returns a handle of the same store that works in another namespace."""
    def lookup(self, keys: _Keys) -> int:
        """Returns how many leading keys are stored. Has no side effects, and never blocks."""
    def prefetch(self, keys: _Keys, within: float = 10.0) -> int:
        """Starts reading the longest stored prefix of the keys into the memory of dram_bytes,
        except blocks already there; a load that follows copies them from there. They are held for
        it for `within` seconds, and are ordinary blocks after that. Returns how many leading blocks
        are there or in flight; 0 without such memory. Never blocks. Prefetches in flight delay
        later transfers: prefetch only for the requests that run next."""
    def hold(self, keys: _Keys) -> Held:
        """Looks up the longest stored prefix of the keys, and protects it from eviction until the
        result is ended, or this process. Never blocks."""
    def load(self, keys: _Keys, blocks: Sequence[int]) -> Request:
        """Loads the longest stored prefix of the keys into the leading ones of these blocks. The
        request has their number, and moves them."""
    def store(self, keys: _Keys, blocks: Sequence[int]) -> Request:
        """Stores blocks under keys, as many leading ones as there is room for. Lookups do not find
        them until the request is committed."""
    def pin(
        self, keys: _Keys, seconds: int, *, bytes_max: int | None = None, wait: bool = False
    ) -> tuple[str, str | None, int | None]:
        """Same as Catalog.pin(), until the store is closed at most."""
    def unpin(self, pin: int) -> bool:
        """Same as Catalog.unpin()."""
    def remove(self, keys: _Keys) -> int:
        """Drops those of these keys that are stored. Returns their number."""
    def take_dropped(self) -> list[bytes]:
        """Returns the keys of the namespace that were evicted, removed or lost since the last call,
        by any handle; not those dropped by clear() and bump_epoch(). They are collected from the
        first call on. Keys of other namespaces are discarded."""
    def clear(self) -> None:
        """Drops all blocks of the namespace."""
    def evict(self, files: int) -> int:
        """Evicts up to this many files of the namespace. Returns the number evicted."""
    def bump_epoch(self) -> int:
        """Permanently drops all blocks of the namespace. Returns the new epoch, which is durable
        when the next sync() has returned."""
    def sync(self) -> None:
        """Makes all earlier evictions, removals and clears durable. Commits are durable when
        they return."""
    def poll_events(self) -> list[tuple[int, str]]:
        """Returns the device events since the last call, as for Plane. Call it about once a second;
        after requested, close the store: the process that wants the device back waits for that."""
    def usage(self) -> Usage:
        """Returns the namespace's counts."""
    def stats(self) -> StoreStats:
        """Returns counters since opening, and the current contents."""
    def close(self) -> None:
        """Makes all changes durable, and releases the directory and the pool. Every later call of
        any handle, request or hold raises ClosedError, except end() and another close(). In a
        forked process every call raises it, except these, which do nothing there."""

@final
class Held(_Context):
    """The longest stored prefix of some keys: its blocks are not evicted before end()."""
    def __enter__(self) -> Held: ...
    @property
    def blocks(self) -> int:
        """Number of blocks."""
    def end(self) -> None:
        """Ends the protection."""

@final
class Request(_Context):
    """Blocks that are being loaded or stored, layer by layer. Ending it (end(), or as a context)
    waits for transfers in flight."""
    def __enter__(self) -> Request: ...
    @property
    def blocks(self) -> int:
        """Number of blocks that it covers."""
    def start(self, layer: int) -> None:
        """Starts a layer."""
    def wait(self, layer: int) -> None:
        """Waits for a layer that was started. Raises TransferError if it failed; then the contents
        of the layer's blocks are undefined. Either way, no transfer uses them any more."""
    def poll(self, layer: int) -> bool:
        """Same as wait(), without blocking: False while the layer is in flight."""
    def move_all(self) -> None:
        """Moves all layers, and waits for them."""
    def commit(self) -> int:
        """Makes the stored blocks durable and visible. Returns how many leading keys lookups now
        find."""
    def end(self) -> None:
        """Waits for transfers in flight, and discards uncommitted blocks."""

@final
class ServedCatalog(_Context):
    """The scheduler's half of an engine that uses the store of a server (`ripieno serve`): the
    calls of a Catalog. Any number of engines share a store; ranks need no devices of their own.

    Connects to the server's socket, which another process listens on. shape: that of a block on
    each rank, which is the server's. engine: a name that scheduler and ranks of one engine have in
    common, and no other engine of the user. ranks: their number.

    Files are numbers that only ranks of this engine may use. While the server is away, lookups find
    nothing and begin() accepts nothing; it is connected to again when it is back. Files and writes
    of before are unknown then."""
    def __new__(
        cls, socket: str | os.PathLike[str], shape: Shape, *, engine: str, ranks: int = 1
    ) -> ServedCatalog: ...
    def __enter__(self) -> ServedCatalog: ...
    def namespace(self, namespace: Namespace) -> int:
        """Same as Catalog.namespace()."""
    def lookup(self, namespace: int, keys: _Keys) -> int:
        """Returns how many leading keys are stored, on all ranks."""
    def are_stored(self, namespace: int, keys: _Keys) -> bytes:
        """Returns a byte for each key: 1 if it is stored on all ranks, else 0."""
    def acquire(self, namespace: int, keys: _Keys) -> Reference:
        """Looks up the longest stored prefix of the keys, and references it until it is
        released."""
    def release(self, reference: int) -> None:
        """Releases a reference. Call it when all ranks have reported."""
    def remove(self, namespace: int, keys: _Keys) -> int:
        """Drops keys for all engines of the namespace, including pinned ones and those in use.
        Returns the number of keys that were stored. While the server is away, returns 0 and drops
        nothing, then or later."""
    def pin(
        self,
        namespace: int,
        keys: _Keys,
        seconds: int,
        *,
        bytes_max: int | None = None,
        wait: bool = False,
    ) -> tuple[str, str | None, int | None]:
        """Same as Catalog.pin(), on all ranks. Pins end with the server, too."""
    def unpin(self, pin: int) -> bool:
        """Same as Catalog.unpin()."""
    def checksums(self, files: Sequence[int], rank: int) -> bytes:
        """Returns no checksums: the server has them, and compares."""
    def begin(self, namespace: int, keys: _Keys) -> Write:
        """Allocates files for new blocks, on all ranks. Pass the whole prefix, including the stored
        part."""
    def written(self, write: int, rank: int, checksums: bytes) -> bool | None:
        """Same as Catalog.written(). The server has the checksums."""
    def failed(self, write: int, rank: int) -> bool | None:
        """Same as Catalog.failed()."""
    def commit(self, write: int, *, durable: bool = False) -> bool:
        """Makes the blocks of a write visible to lookups of all engines. They are durable when this
        returns if that is asked for, or else after the next sync(). Returns False if the server is
        away, began anew, or takes no writes any more: then they may be lost."""
    def abort(self, write: int) -> None:
        """Ends a write. None of it becomes visible."""
    def lost(self, files: Sequence[int]) -> None:
        """Does nothing: the server has marked files that could not be read."""
    def bump_epoch(self, namespace: int) -> int:
        """Drops all blocks of a namespace for this engine, whose weights change. Other engines keep
        them, and share none with this engine from now on. Returns a new epoch, a random number."""
    def usage(self, namespace: int) -> Usage:
        """Returns the namespace's counts, on the first rank."""
    def stats(self) -> CatalogStats:
        """Returns the counts of the server's store."""
    def sync(self) -> None:
        """Makes all earlier commits durable. While the server is away, does nothing: commits from
        before its end may be lost. Those with durable=True are not."""
    def close(self) -> None:
        """Same as sync(), and leaves the server. Every later call raises ClosedError, except
        another close(). In a forked process every call raises it, and close() does nothing."""

@final
class ServedPlane(_Context):
    """A rank's half of an engine that uses the store of a server: the calls of a Plane.

    Connects to the server's socket. pool: memory that the server shares, with its file (see
    SharedMemory); objects are whole pages. engine, ranks: same as for ServedCatalog. rank: the
    number of this rank.

    While the server is away, begin_load() and begin_store() raise LostError, and end() reports that
    jobs failed: blocks that were being loaded are zeros then, and no transfer uses them any
    more."""
    def __new__(
        cls,
        socket: str | os.PathLike[str],
        shape: Shape,
        pool: Pool,
        *,
        engine: str,
        ranks: int = 1,
        rank: int = 0,
    ) -> ServedPlane: ...
    def __enter__(self) -> ServedPlane: ...
    @property
    def is_bounced(self) -> bool:
        """False: the server's devices reach the shared memory."""
    @property
    def placement(self) -> str:
        """Names the server."""
    @property
    def is_paced(self) -> bool:
        """True if the server decides when layers start: loads before stores, of all engines."""
    def begin_store(self, files: Sequence[int], blocks: Sequence[int]) -> int:
        """Prepares to store blocks of the pool in files of a write. Returns the job."""
    def begin_load(
        self,
        files: Sequence[int],
        blocks: Sequence[int],
        checksums: bytes | None = None,
        *,
        request: int = 0,
        step: int | None = None,
    ) -> int:
        """Prepares to load files of a reference into blocks of the pool. Returns the job. The other
        arguments are those of Plane.begin_load(), and without effect."""
    def hurry(self, job: int) -> None:
        """Same as Plane.hurry()."""
    def start(self, job: int, layer: int) -> None:
        """Starts a layer of a job."""
    def wait(self, job: int, layer: int) -> None:
        """Waits for a layer that was started. Raises TransferError if it failed, and LostError if
        the server died: transfers may use its blocks until end() returns."""
    def poll(self, job: int, layer: int) -> bool:
        """Same as wait(), without blocking: False while the layer is in flight."""
    def end(self, jobs: Sequence[int]) -> list[Report]:
        """Ends jobs: waits for their layers in flight, and makes stored data durable. A layer that
        was never started is an error of its job, and so is a server that died."""
    def take_lost(self) -> list[int]:
        """Returns files that could not be read since the last call. The server has marked them."""
    def close(self) -> None:
        """Leaves the server, after transfers in flight. Every later call raises ClosedError, except
        another close(). In a forked process every call raises it, and close() does nothing."""

def parse_size(size: int | str, name: str = "size") -> int:
    """Returns the bytes of a size: a number of bytes, or text such as "64MiB". name: what it is the
    size of, for the error."""

def server_shape(socket: str | os.PathLike[str]) -> Shape:
    """Returns the shape of the blocks of the server that listens on a socket."""

def prepare(
    path: str | os.PathLike[str],
    shape: Shape,
    *,
    ranks: int = 1,
    capacity: int | str | None = None,
    devices: int | Sequence[str] | None = None,
    overwrite: Literal["nothing", "store", "anything"] = "nothing",
) -> list[RankId]:
    """Creates a store for several processes in a directory, unless there is one: its catalog, and a
    part for each rank. The first process creates it; the others wait.

    capacity: size of all ranks' data, in bytes or as "100GiB"; files are allocated immediately.
    devices: files per rank (1), or drives that are bound to vfio-pci (["vfio:0000:65:00.0", ...]),
    the same number for each rank. overwrite: data on a drive that may be overwritten: nothing,
    store, or anything. Returns the identity of each rank, which opens its plane.
    """

def take_events(timeout: float) -> list[tuple[float, int, str, str, int, str]] | None:
    """Returns the events logged since the last call. Waits for one, at most `timeout` seconds. None
    when there will be no more."""

def end_events() -> None:
    """Makes take_events() return the remaining events, and then None."""

def set_event_level(level: int) -> None:
    """Drops events below this Python level at their source, at the cost of a comparison."""
