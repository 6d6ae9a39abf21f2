"""Opens a store where the kernel has no io_uring, as in QEMU's user mode, and is told so."""

import tempfile

import ripieno

shape = ripieno.Shape(layers=3, segments=2, object_bytes=4096, block_tokens=16)
pool = ripieno.Pool.contiguous(bytearray(shape.rows * 4 * shape.object_bytes), shape)
with tempfile.TemporaryDirectory(dir=".") as home:
    try:
        ripieno.Store(home, shape, pool, capacity=32 << 20)
    except ripieno.Error as error:
        assert "direct I/O" in str(error), error
    else:
        raise AssertionError("a store without io_uring")
