"""Ripieno: an object store for KV cache, with NVMe SSDs as a memory tier.

Store is for an engine of one process. An engine with a scheduler and workers creates a store for
several processes with prepare(), opens a Catalog in its scheduler and a Plane in each worker, and
sends numbers and bytes between them. Store.connect(), ServedCatalog and ServedPlane are the same for
a store that a server (`ripieno serve`) shares between engines.

    import numpy, ripieno

    shape = ripieno.Shape(layers=4, segments=2, object_bytes=8192, block_tokens=16)
    kv = numpy.zeros((4 * 2, 64, 8192), numpy.uint8)  # the engine's KV memory: 64 blocks
    pool = ripieno.Pool.contiguous(kv, shape)
    with ripieno.Store("kv", shape, pool, capacity="1GiB") as store:
        with store.store(keys, blocks) as request:  # keys: 32 bytes each
            request.move_all()
            request.commit()
        with store.load(keys, blocks) as request:
            request.move_all()
"""

import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import errors, stats
from ._ripieno import (
    METRICS,
    Catalog,
    Held,
    Plane,
    Reference,
    Report,
    Request,
    ServedCatalog,
    ServedPlane,
    Store,
    Write,
    __version__,
    parse_size,
    prepare,
    server_shape,
)
from .errors import *  # noqa: F403
from .stats import *  # noqa: F403

__all__ = [
    "METRICS",
    "Catalog",
    "Held",
    "Namespace",
    "Plane",
    "Pool",
    "RankId",
    "Reference",
    "Report",
    "Request",
    "ServedCatalog",
    "ServedPlane",
    "Shape",
    "SharedMemory",
    "Store",
    "Write",
    "parse_size",
    "prepare",
    "server_shape",
    *errors.__all__,
    *stats.__all__,
]


@dataclass(frozen=True)
class Shape:
    """Shape of a KV block. An object holds the KV data of one layer and segment."""

    layers: int
    """Layers of the model."""
    segments: int
    """Objects of a layer: 2 where K and V are separate tensors, 1 where they are one."""
    object_bytes: int
    """Bytes of an object."""
    block_tokens: int
    """Tokens of a block."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise errors.InvalidError(f"shape: {name} is {value}; give 1 or more")

    @property
    def rows(self) -> int:
        """Objects of a block. The row of an object is layer * segments + segment."""
        return self.layers * self.segments


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal for two engines to read each other's blocks. Keys of two
    namespaces never match."""

    weights: bytes = b""
    """Digest of the model's weights, or of their name and revision: 32 bytes, or empty."""
    layout: str = ""
    """Memory layout of a block: shape, order of dimensions, rows."""
    dtype: str = ""
    """Type of an element, such as "bfloat16"."""
    block_tokens: int = 0
    """Tokens of a block."""
    adapter: str = ""
    """Adapter (LoRA) the blocks were computed with."""
    tenant_salt: bytes = b""
    """Salt that separates the tenant's blocks from others. Only its digest is stored."""
    label: str = ""
    """Label for reports, not part of the identity. At most 64 bytes."""


@dataclass(frozen=True)
class RankId:
    """Identity of a rank's part of a store, which opens its plane."""

    store: str
    """Number of the store."""
    rank: int
    """Number of the rank, from 0."""
    ranks: int
    """Number of ranks."""
    files: int
    """Files of each rank."""


@dataclass(frozen=True)
class Pool:
    """An engine's KV memory, in this process or on a GPU. The object of block b in row r is at
    address + rows[r] + b * block_stride.

    It must keep its address, readable and writable, as long as owner exists; a store or plane keeps
    owner until it is closed. Any alignment works; multiples of 4 bytes avoid copies.
    """

    address: int
    """First byte."""
    length: int
    """Length in bytes."""
    rows: Sequence[int]
    """Offset of block 0 of each row, in bytes."""
    block_stride: int
    """Bytes from one block's object to that of the next block."""
    blocks: int
    """Number of blocks."""
    owner: Any = field(default=None, repr=False)
    """Object that keeps the memory alive."""
    device: str = "cpu"
    """Location of the memory: cpu, or cuda:0 with the GPU's number."""
    file: int | None = None
    """For a server: the memory's file, open, whose first byte is at address. See SharedMemory. A
    GPU's memory has none: the server maps it, which has to be one allocation of cudaMalloc."""

    @classmethod
    def contiguous(cls, buffer: Any, shape: Shape) -> "Pool":
        """Returns the pool in a writable, contiguous buffer (numpy) or tensor (torch, on the CPU or
        a GPU) laid out as [rows, blocks, object_bytes]; each of the three may be several dimensions
        of an array. A flat buffer has as many blocks as fit."""
        address, owner, device, dimensions, each = memory_of(buffer)
        length, block = math.prod(dimensions) * each, shape.rows * shape.object_bytes
        rows = (math.prod(dimensions[:at]) for at in range(len(dimensions)))
        objects = (math.prod(dimensions[at:]) * each for at in range(1, len(dimensions) + 1))
        is_array = len(dimensions) > 1
        if is_array and (shape.rows not in rows or shape.object_bytes not in objects):
            raise errors.InvalidError(
                f"an array of shape {list(dimensions)} with elements of {each} bytes was given; its "
                f"first dimensions have to be the {shape.rows} rows (layers * segments), and its "
                f"last ones an object of {shape.object_bytes} bytes, or give a flat buffer"
            )
        blocks = length // block
        if blocks == 0:
            raise errors.InvalidError(
                f"a buffer of {length} bytes was given; a block has {block} ({shape}): give a "
                "larger one"
            )
        tensor = blocks * shape.object_bytes
        offsets = [row * tensor for row in range(shape.rows)]
        return cls(address, length, offsets, shape.object_bytes, blocks, owner, device)


class SharedMemory:
    """Memory that a server may share, for the pool of Store.connect() or a ServedPlane.

        memory = ripieno.SharedMemory(bytes)
        pool = dataclasses.replace(ripieno.Pool.contiguous(memory.buffer, shape), file=memory.file)

    Its bytes are zero. It exists as long as this object or a view of the buffer does.
    """

    def __init__(self, size: int) -> None:
        """size: bytes, rounded up to whole pages."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = os.memfd_create("ripieno-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Its descriptor."""
        try:
            os.ftruncate(self.file, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals)
            self.buffer = mmap.mmap(self.file, size)
            """The memory. Its pages are small: they can be replaced one by one."""
            self.buffer.madvise(mmap.MADV_NOHUGEPAGE)
        except BaseException:
            os.close(self.file)
            raise

    def __del__(self) -> None:
        # Mappings, and the descriptors of planes, keep the memory.
        if hasattr(self, "file"):
            os.close(self.file)


def memory_of(buffer: Any) -> tuple[int, Any, str, Sequence[int], int]:
    """Returns address, owner and device of a buffer or tensor, its dimensions, and the bytes of an
    element."""
    if hasattr(buffer, "data_ptr"):
        if buffer.device.type not in ("cpu", "cuda") or not buffer.is_contiguous():
            raise errors.InvalidError(
                f"a tensor on {buffer.device} was given; give a contiguous one on the CPU or a "
                "CUDA device"
            )
        device = str(buffer.device)
        return buffer.data_ptr(), buffer, device, buffer.shape, buffer.element_size()
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise errors.InvalidError("the buffer is read-only or has gaps; give a contiguous one")
    # The export keeps the buffer alive and prevents resizing.
    owner = (ctypes.c_char * view.nbytes).from_buffer(buffer)
    return ctypes.addressof(owner), owner, "cpu", view.shape or (), view.itemsize
