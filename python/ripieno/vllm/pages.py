"""Whole pages for a KV cache in host memory, so that files are read into it directly."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

import ripieno

if TYPE_CHECKING:
    from . import RipienoConnector

# vLLM shows only messages logged below its own name.
logger = init_logger("vllm.ripieno")

HUGE_BYTES = 2 << 20
"""Size of a huge page."""


def move_to_pages(connector: RipienoConnector, cache: torch.Tensor) -> None:
    """Moves an empty KV cache in host memory to huge pages.

    PyTorch aligns memory to 64 bytes. Direct I/O needs the alignment of the disk, often 512, and
    its cost is by the page: with small ones it exceeds that of a copy. `cache`: any tensor of the
    KV cache. All tensors in its memory, which are those of vLLM's layers, are changed to the new
    memory. If something else refers to the old memory, the KV cache stays there.
    """
    old = cache.untyped_storage()
    if cache.device.type != "cpu" or old.data_ptr() % HUGE_BYTES == 0:
        return
    del old
    why = _move(connector, cache, _pages) if _has_huge_pages() else "this system has no huge ones"
    if why:
        logger.info("ripieno: the KV cache stays in small pages: %s", why)


def move_to_shared(connector: RipienoConnector, cache: torch.Tensor) -> ripieno.SharedMemory:
    """Moves an empty KV cache in host memory to memory that a server shares, and returns that.
    Raises ValueError if it cannot be moved."""
    if cache.device.type != "cpu":
        raise ValueError(
            f"server: the KV cache is on {cache.device}; it shares memory of the host, or of a GPU "
            "with CUDA"
        )
    shared = ripieno.SharedMemory(cache.untyped_storage().nbytes())

    def pages(size: int) -> torch.UntypedStorage:
        return torch.frombuffer(shared.buffer, dtype=torch.uint8, count=size).untyped_storage()

    if why := _move(connector, cache, pages):
        raise ValueError(f"server: the KV cache cannot be shared: {why}")
    return shared


def _move(
    connector: RipienoConnector,
    cache: torch.Tensor,
    allocate: Callable[[int], torch.UntypedStorage],
) -> str | None:
    """Moves an empty KV cache to other memory. Returns the reason if it stays where it is."""
    # Another connector may have registered the addresses. An array of NumPy makes the memory fixed.
    old = cache.untyped_storage()
    is_alone = has_kv_transfer_group() and get_kv_transfer_group() is connector
    if not is_alone or not old.resizable():
        return "others use its address"
    new = allocate(old.nbytes())
    tensors = [each for each in _tensors() if each.untyped_storage()._cdata == old._cdata]
    with torch.inference_mode():
        for each in tensors:
            each.set_(new, each.storage_offset(), each.size(), each.stride())
        # One reference in C++ is that of `old`; two in Python are `old` and the argument.
        if torch._C._storage_Use_Count(old._cdata) == 1 and sys.getrefcount(old) == 2:
            del old
            new.fill_(0)
            return None
        for each in tensors:
            each.set_(old, each.storage_offset(), each.size(), each.stride())
    return "something else refers to its memory"


def _has_huge_pages() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return "[never]" not in file.read()
    except FileNotFoundError:
        return False


def _tensors() -> list[torch.Tensor]:
    """Returns all tensors in memory of this process, and those that they are views of."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    found = [each for each in found if each.layout is torch.strided and each.device.type == "cpu"]
    bases = [each._base for each in found if each._base is not None]
    return list({id(each): each for each in found + bases}.values())


def _pages(size: int) -> torch.UntypedStorage:
    """Allocates huge pages, which are not there before they are written."""
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_BYTES
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).untyped_storage()
