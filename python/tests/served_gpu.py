"""An engine with KV memory on a GPU, whose store is a server's: a program for test_served_gpu.py.

It calls libcuda itself, as an engine does, because PyTorch needs a real one.
"""

import ctypes
import hashlib
import sys

import ripieno

SHAPE = ripieno.Shape(layers=6, segments=2, object_bytes=4096, block_tokens=16)
BLOCKS = 8
LENGTH = SHAPE.rows * BLOCKS * SHAPE.object_bytes
KEYS = [hashlib.sha256(str(number).encode()).digest() for number in range(4)]


class Gpu:
    """The first GPU, its memory, and a stream."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so")
        self.call("cuInit", 0)
        device, context, mode = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint(2)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self.address, self.stream = ctypes.c_uint64(), ctypes.c_void_p()
        self.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(LENGTH))
        self.call("cuStreamCreateWithPriority", ctypes.byref(self.stream), 1, 0)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name} returned {code}"

    def write(self, content):
        size = ctypes.c_size_t(LENGTH)
        self.call("cuMemcpyHtoD_v2", self.address, content, size)
        # A copy back is behind it.
        assert self.read() == content

    def read(self):
        content = ctypes.create_string_buffer(LENGTH)
        self.call("cuMemcpyDtoH_v2", content, self.address, ctypes.c_size_t(LENGTH))
        return content.raw


def main(socket):
    gpu = Gpu()
    pool = ripieno.Pool(
        address=gpu.address.value,
        length=LENGTH,
        rows=[row * BLOCKS * SHAPE.object_bytes for row in range(SHAPE.rows)],
        block_stride=SHAPE.object_bytes,
        blocks=BLOCKS,
        device="cuda:0",
    )
    catalog = ripieno.ServedCatalog(socket, SHAPE, engine="engine")
    plane = ripieno.ServedPlane(socket, SHAPE, pool, engine="engine")
    assert not plane.is_paced and not plane.is_bounced
    space = catalog.namespace(ripieno.Namespace())
    content = b"".join(
        hashlib.sha256(bytes([at % 251, at // 251])).digest() * 128 for at in range(96)
    )
    gpu.write(content)
    write = catalog.begin(space, KEYS)
    job = plane.begin_store(write.files, [0, 1, 2, 3])
    for layer in range(SHAPE.layers):
        plane.start(job, layer, gpu.stream.value)
    (report,) = plane.end([job])
    assert report.error is None
    assert catalog.written(write.id, 0, report.checksums)
    assert catalog.commit(write.id, durable=True)

    gpu.write(bytes(LENGTH))
    found = catalog.acquire(space, KEYS)
    job = plane.begin_load(found.files, [7, 6, 5, 4])
    for layer in range(SHAPE.layers):
        plane.start(job, layer, gpu.stream.value)
    for layer in range(SHAPE.layers):
        plane.wait(job, layer)
    (report,) = plane.end([job])
    assert report.error is None
    loaded, each = gpu.read(), SHAPE.object_bytes
    for row in range(SHAPE.rows):
        for block in range(4):
            here, there = (row * BLOCKS + 7 - block) * each, (row * BLOCKS + block) * each
            assert loaded[here : here + each] == content[there : there + each], (row, block)
    catalog.release(found.id)
    plane.close()
    catalog.close()


if __name__ == "__main__":
    main(sys.argv[1])
