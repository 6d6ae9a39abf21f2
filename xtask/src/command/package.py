"""Stores blocks, opens the store again, and loads them."""

import os

import ripieno

shape = ripieno.Shape(layers=3, segments=2, object_bytes=4096, block_tokens=16)
blocks = 4
kv = bytearray(shape.rows * blocks * shape.object_bytes)
pool = ripieno.Pool.contiguous(kv, shape)
keys = [os.urandom(32) for _ in range(2)]
sent = os.urandom(len(kv))
with ripieno.Store("store", shape, pool, capacity=32 << 20) as store:
    kv[:] = sent
    with store.store(keys, [0, 1]) as request:
        request.move_all()
        assert request.commit() == 2
kv[:] = bytes(len(kv))
with ripieno.Store("store", shape, pool) as store:
    with store.load(keys, [0, 1]) as request:
        assert request.blocks == 2
        request.move_all()
size = shape.object_bytes
for row in range(shape.rows):
    at = row * blocks * size
    assert kv[at : at + 2 * size] == sent[at : at + 2 * size], row
    assert not any(kv[at + 2 * size : at + blocks * size]), row
print("stored and loaded:", ripieno.__file__)
