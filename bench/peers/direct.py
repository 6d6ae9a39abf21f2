"""Reads a file with O_DIRECT and nothing else: a lower bound for any store."""

import mmap
import os
import threading
import time

READ = 1 << 20


def make(path, size):
    """Creates a file whose blocks are written, not only allocated."""
    piece = os.urandom(READ)
    with path.open("wb") as file:
        for _ in range(-(-size // READ)):
            file.write(piece)
        os.fsync(file.fileno())


def read(path, offset, size):
    """Returns the seconds of each way to read."""
    memory = mmap.mmap(-1, size + (1 << 21), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)[:size]
    # Page faults on untouched memory would cost more than the read.
    view[::4096] = bytes(len(view[::4096]))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return {
            f"plain {threads} x {each >> 10} KiB": timed(descriptor, view, offset, each, threads)
            for threads, each in ((1, READ), (4, READ), (4, 1 << 16))
        }
    finally:
        os.close(descriptor)
        view.release()
        memory.close()


def timed(descriptor, view, offset, each, count):
    pieces = list(range(0, len(view), each))

    def part(at):
        for start in pieces[at::count]:
            os.preadv(descriptor, [view[start : start + each]], offset + start)

    threads = [threading.Thread(target=part, args=(at,)) for at in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began
