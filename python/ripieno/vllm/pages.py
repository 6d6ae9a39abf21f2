"""Whole pages for a KV cache in host memory, so that files are read into it directly."""

from __future__ import annotations

import gc
import mmap
import sys
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

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
    if not _has_huge_pages():
        logger.info("ripieno: the KV cache stays in small pages: this system has no huge ones")
        return
    # Another connector may have registered the addresses. An array of NumPy makes the memory fixed.
    is_alone = has_kv_transfer_group() and get_kv_transfer_group() is connector
    if not is_alone or not old.resizable():
        logger.info("ripieno: the KV cache stays in small pages: others use its address")
        return
    new = _pages(old.nbytes())
    tensors = [each for each in _tensors() if each.untyped_storage()._cdata == old._cdata]
    with torch.inference_mode():
        for each in tensors:
            each.set_(new, each.storage_offset(), each.size(), each.stride())
        # One reference in C++ is that of `old`; two in Python are `old` and the argument.
        if torch._C._storage_Use_Count(old._cdata) == 1 and sys.getrefcount(old) == 2:
            del old
            new.fill_(0)
            return
        for each in tensors:
            each.set_(old, each.storage_offset(), each.size(), each.stride())
    logger.info("ripieno: the KV cache stays in small pages: something else refers to its memory")


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
