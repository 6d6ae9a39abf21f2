"""Metrics that a store and a rank's plane serve."""

import hashlib

import numpy
import pytest
from scraping import scrape

import ripieno

SHAPE = ripieno.Shape(layers=3, segments=1, object_bytes=4096, block_tokens=16)
BLOCKS = 4
CAPACITY = 32 << 20
BLOCK_BYTES = SHAPE.rows * SHAPE.object_bytes


def pool():
    kv = numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)
    return ripieno.Pool.contiguous(kv, SHAPE)


def keys(count):
    return [hashlib.sha256(bytes([number])).digest() for number in range(count)]


def test_a_store_counts_what_it_did(tmp_path):
    socket = tmp_path / "m"
    given = {"capacity": CAPACITY, "metrics": str(socket)}
    with ripieno.Store(tmp_path / "s", SHAPE, pool(), **given) as store:
        with store.store(keys(3), [0, 1, 2]) as request:
            request.move_all()
            assert request.commit() == 3
        with store.load(keys(4), [0, 1, 2, 3]) as request:
            request.move_all()
        kinds, samples = scrape(given["metrics"])
        known = {f"ripieno_{name}": kind for name, kind, _ in ripieno.METRICS}
        assert kinds.items() <= known.items()
    expected = {
        "stored_bytes_total": 3 * BLOCK_BYTES,
        "loaded_bytes_total": 3 * BLOCK_BYTES,
        "used_blocks": 3,
        "hit_tokens_total": 3 * SHAPE.block_tokens,
        "load_seconds_count": 1,
        "save_seconds_count": 1,
        "healthy": 1,
    }
    assert {name: samples[f"ripieno_{name}"] for name in expected} == expected
    assert not socket.exists(), "it ends with the store"


def test_a_plane_counts_what_it_did_and_has_no_catalog(tmp_path):
    (rank,) = ripieno.prepare(tmp_path / "s", SHAPE, ranks=1, capacity=CAPACITY)
    address = str(tmp_path / "m")
    with ripieno.Plane(tmp_path / "s", rank, SHAPE, pool(), metrics=address) as plane:
        job = plane.begin_store([5, 6], [0, 1])
        for layer in range(SHAPE.layers):
            plane.start(job, layer)
        assert plane.end([job])[0].error is None
        _, samples = scrape(address)
    assert samples["ripieno_stored_bytes_total"] == 2 * BLOCK_BYTES
    assert samples["ripieno_save_seconds_count"] == 1
    assert "ripieno_capacity_blocks" not in samples


def test_wrong_addresses_are_refused(tmp_path):
    for address, message in [
        ("metrics.sock", "^metrics: .* was given; `metrics.sock` is no address; give a port"),
        ("0.0.0.0:9400", "^metrics: .* other machines reach .* write public:0.0.0.0:9400"),
    ]:
        with pytest.raises(ripieno.InvalidError, match=message):
            ripieno.Store(tmp_path / "s", SHAPE, pool(), capacity=CAPACITY, metrics=address)
    assert not (tmp_path / "s").exists()
    with pytest.raises(ripieno.Error, match="/there/is/none"):
        ripieno.Store(
            tmp_path / "s", SHAPE, pool(), capacity=CAPACITY, metrics=f"{tmp_path}/there/is/none"
        )
