"""The events of stored blocks, in a file beside the store: after a restart the engine publishes them
again, of the blocks that are still there. The store itself knows keys, and no tokens."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.logger import init_logger

import ripieno

if TYPE_CHECKING:
    from io import FileIO

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")

GROWTH_BYTES = 1 << 20
"""The file is written anew when it has grown by as much as it had, and by this."""
AGAIN_RECORDS = 64
"""Records that are read ahead of the engine's steps, which publish them."""
CLOSE_SECONDS = 10


class Record(msgspec.Struct, array_like=True):  # type: ignore[call-arg, unused-ignore]
    """An event, with what the catalog knows its blocks by."""

    space: tuple[str, str]
    """The digest of an adapter, and the tenant."""
    keys: list[bytes]
    """One for each of its blocks."""
    event: BlockStored

    def of(self, flags: Sequence[bool]) -> Iterator[Record]:
        """Yields a record for each run of blocks whose flags are set."""
        first, event, size = 0, self.event, self.event.block_size
        for last in range(len(flags) + 1):
            if last < len(flags) and flags[last]:
                continue
            if first < last:
                extra = event.extra_keys and event.extra_keys[first:last]
                part = msgspec.structs.replace(
                    event,
                    block_hashes=event.block_hashes[first:last],
                    parent_block_hash=event.block_hashes[first - 1]
                    if first
                    else event.parent_block_hash,
                    token_ids=event.token_ids[first * size : last * size],
                    extra_keys=extra,
                )
                yield Record(self.space, self.keys[first:last], part)
            first = last + 1


class History:
    """The file, which a thread reads and writes. Only this user can read it: it has the tokens."""

    def __init__(self, path: str, are_stored: Callable[[tuple[str, str], list[bytes]], list[bool]]) -> None:
        """are_stored(space, keys) is called in the thread as well."""
        self.path, self.are_stored = path, are_stored
        self.again: queue.Queue[Record] = queue.Queue(AGAIN_RECORDS)
        """Records of the engine before, for take()."""
        self.added: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="ripieno-events", daemon=True)
        self.thread.start()

    def add(self, records: Sequence[Record]) -> None:
        if self.thread.is_alive():
            for each in records:
                self.added.put(each)

    def take(self, blocks: int) -> list[Record]:
        """Returns records of the engine before, until they have this many blocks. Some may be gone
        since they were read."""
        found: list[Record] = []
        while blocks > 0:
            try:
                record = self.again.get_nowait()
            except queue.Empty:
                break
            blocks -= len(record.keys)
            found.append(record)
        return found

    def close(self) -> None:
        self.is_closed.set()
        self.added.put(None)
        self.thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        publish = self._publish
        try:
            while True:
                size = self._rewrite(publish)
                publish = self._ignore
                with self._open(self.path, os.O_APPEND) as file:
                    while file.tell() - size < max(size, GROWTH_BYTES):
                        record = self.added.get()
                        if record is None:
                            return
                        self._write(file, record)
        except (OSError, ripieno.Error) as error:
            logger.warning("ripieno: blocks are not announced after a restart: %s", error)

    def _publish(self, record: Record) -> None:
        while not self.is_closed.is_set():
            try:
                return self.again.put(record, timeout=1)
            except queue.Full:
                continue

    @staticmethod
    def _ignore(record: Record) -> None:
        return

    def _rewrite(self, publish: Callable[[Record], None]) -> int:
        """Writes the records of stored blocks to a new file, in place of the old one. Returns its
        size."""
        new = f"{self.path}.new"
        # A block that was stored again was told again, behind the one that it follows.
        last = {
            (record.space, key): at
            for at, record in enumerate(self._read())
            for key in record.keys
        }
        with self._open(new, os.O_TRUNC) as file:
            for at, record in enumerate(self._read()):
                flags = self.are_stored(record.space, record.keys)
                flags = [
                    is_stored and last[record.space, key] == at
                    for key, is_stored in zip(record.keys, flags, strict=True)
                ]
                for each in record.of(flags):
                    self._write(file, each)
                    publish(each)
            os.replace(new, self.path)
            return file.tell()

    def _read(self) -> Iterator[Record]:
        decoder = msgspec.msgpack.Decoder(Record)
        try:
            with open(self.path, "rb") as file:
                while len(head := file.read(4)) == 4:
                    data = file.read(int.from_bytes(head, "little"))
                    yield decoder.decode(data)
        except FileNotFoundError:
            return
        except msgspec.MsgspecError as error:
            # Cut off when an engine was killed, or of another vLLM.
            logger.info("ripieno: %s: the rest is left out: %s", self.path, error)

    @staticmethod
    def _open(path: str, how: int) -> FileIO:
        file = open(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "ab", buffering=0)
        os.fchmod(file.fileno(), 0o600)
        return file

    @staticmethod
    def _write(file: FileIO, record: Record) -> None:
        data = msgspec.msgpack.encode(record)
        file.write(len(data).to_bytes(4, "little") + data)
