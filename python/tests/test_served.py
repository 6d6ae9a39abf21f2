"""Engines that share the store of a server: a catalog, and two ranks with shared memory."""

import hashlib
from dataclasses import replace

import numpy
import pytest
from serving import Server
from waiting import until

import ripieno

SHAPE = ripieno.Shape(layers=3, segments=1, object_bytes=4096, block_tokens=16)
BLOCKS = 8
RANKS = 2


def key(number):
    return hashlib.sha256(str(number).encode()).digest()


KEYS = [key(number) for number in range(6)]


def content(key, rank):
    random = numpy.random.default_rng([int.from_bytes(key[:8], "little"), rank])
    return random.integers(0, 256, (SHAPE.rows, SHAPE.object_bytes), numpy.uint8)


class Rank:
    def __init__(self, server, engine, rank):
        memory = ripieno.SharedMemory(SHAPE.rows * BLOCKS * SHAPE.object_bytes)
        self.kv = numpy.frombuffer(memory.buffer, numpy.uint8).reshape(SHAPE.rows, BLOCKS, -1)
        pool = replace(ripieno.Pool.contiguous(memory.buffer, SHAPE), file=memory.file)
        part = {"engine": engine, "ranks": RANKS, "rank": rank}
        self.plane = ripieno.ServedPlane(server.socket, SHAPE, pool, **part)
        self.rank = rank

    def store(self, keys, files):
        for block, each in enumerate(keys):
            self.kv[:, block] = content(each, self.rank)
        return self.move(self.plane.begin_store(files, list(range(len(files)))))

    def load(self, keys, files):
        """Returns the error, and for each block if it is right."""
        self.kv[:] = 0
        error = self.move(self.plane.begin_load(files, list(range(len(files))), b"", request=1))
        return error, [(self.kv[:, at] == content(key, self.rank)).all() for at, key in keys]

    def move(self, job):
        for layer in range(SHAPE.layers):
            self.plane.start(job, layer)
        self.plane.wait(job, 0)
        while not self.plane.poll(job, 1):
            pass
        (report,) = self.plane.end([job])
        assert report.job == job and report.checksums == b""
        return report.error


class Engine:
    def __init__(self, server, name):
        self.ranks = [Rank(server, name, rank) for rank in range(RANKS)]
        self.catalog = ripieno.ServedCatalog(server.socket, SHAPE, engine=name, ranks=RANKS)
        self.space = self.catalog.namespace(ripieno.Namespace(dtype="bytes"))

    def store(self, keys):
        write = self.catalog.begin(self.space, keys)
        own = [keys[at] for at in write.positions]
        states = []
        for rank in self.ranks:
            assert rank.store(own, write.files) is None
            states.append(self.catalog.written(write.id, rank.rank, b""))
        assert states == [None, True]
        assert self.catalog.commit(write.id)
        self.catalog.sync()
        return write.accepted, len(own)

    def load(self, keys):
        found = self.catalog.acquire(self.space, keys)
        for rank in self.ranks:
            pairs = list(enumerate(keys[: len(found.files)]))
            error, right = rank.load(pairs, found.files)
            assert error is None and all(right)
        self.catalog.release(found.id)
        assert self.catalog.lookup(self.space, keys) == len(found.files)
        return len(found.files)

    def close(self):
        self.catalog.close()
        for rank in self.ranks:
            rank.plane.close()


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, SHAPE) as server:
        yield server


def test_engines_share_what_they_store(server):
    one, other = Engine(server, "one"), Engine(server, "other")
    assert not one.ranks[0].plane.is_paced
    assert one.store(KEYS[:4]) == (4, 4)
    assert other.load(KEYS) == 4
    assert other.store(KEYS) == (6, 2)
    assert one.load(KEYS) == 6
    assert one.catalog.are_stored(one.space, [KEYS[5], key(99)]) == [True, False]
    assert one.catalog.stats().stored == 6 * RANKS
    assert one.catalog.usage(one.space).stored == 6
    # On both ranks; one pin of each engine.
    assert one.catalog.pin(one.space, KEYS, 60) == ("accepted", None, 1)
    assert server.status()["pinned_bytes"] == 6 * RANKS * SHAPE.rows * SHAPE.object_bytes
    few = RANKS * SHAPE.rows * SHAPE.object_bytes
    outcome, reason, pin = other.catalog.pin(other.space, KEYS, 60, bytes_max=few)
    assert (outcome, reason, pin) == ("clipped", "there is room for 1 of 6 blocks", 2)
    assert other.catalog.pin(other.space, [key(7)], 60, wait=True)[0] == "deferred"
    assert [each.catalog.unpin(2) for each in (one, other, other)] == [False, True, False]
    # Other weights: the engines have nothing in common any more.
    assert one.catalog.bump_epoch(one.space) != one.catalog.bump_epoch(one.space)
    assert (one.load(KEYS), other.load(KEYS)) == (0, 6)
    one.close()
    with pytest.raises(ripieno.ClosedError):
        one.catalog.lookup(0, KEYS)
    other.close()
    status = server.settled()
    assert (status["files_referenced"], status["files_writing"]) == (0, 0)
    assert status["refused_calls"] == 0


def test_engines_share_a_server_that_paces(tmp_path):
    with Server(tmp_path, SHAPE, pacing=True) as server:
        one, other = Engine(server, "one"), Engine(server, "other")
        plane, kv = one.ranks[0].plane, one.ranks[0].kv
        assert plane.is_paced
        assert one.store(KEYS[:4]) == (4, 4)
        assert other.load(KEYS) == 4
        # A store that is hurried starts at once.
        write = one.catalog.begin(one.space, KEYS)
        for block, at in enumerate(write.positions):
            kv[:, block] = content(KEYS[at], 0)
        job = plane.begin_store(write.files, [0, 1])
        for layer in range(SHAPE.layers):
            plane.start(job, layer)
        plane.hurry(job)
        while not all(plane.poll(job, layer) for layer in range(SHAPE.layers)):
            pass
        assert [report.error for report in plane.end([job])] == [None]
        one.catalog.abort(write.id)
        with pytest.raises(ripieno.InvalidError, match="job"):
            plane.hurry(job)
        one.close()
        other.close()
        status = server.settled()
        assert (status["files_referenced"], status["files_writing"]) == (0, 0)
        assert status["refused_calls"] == 0


def test_files_of_another_engine_are_refused(server):
    one, other = Engine(server, "one"), Engine(server, "other")
    one.store(KEYS)
    files = one.catalog.acquire(one.space, KEYS).files
    for plane in (other.ranks[0].plane, other.ranks[1].plane):
        with pytest.raises(ripieno.InvalidError, match="not, or no longer"):
            plane.begin_load(files, [0] * len(files))
        with pytest.raises(ripieno.InvalidError, match="not, or no longer"):
            plane.begin_store(files, list(range(len(files))))
    with pytest.raises(ripieno.InvalidError, match="places of one prefix"):
        one.ranks[0].plane.begin_load([files[0], 5 << 16], [0, 1])
    with pytest.raises(ripieno.BusyError, match="engine one has a scheduler already"):
        ripieno.ServedCatalog(server.socket, SHAPE, engine="one", ranks=RANKS)
    with pytest.raises(ripieno.DamagedError, match="has blocks of"):
        shape = replace(SHAPE, layers=5)
        ripieno.ServedCatalog(server.socket, shape, engine="two")
    memory = numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)
    with pytest.raises(ripieno.InvalidError, match=r"pool\.file is None"):
        pool = ripieno.Pool.contiguous(memory, SHAPE)
        ripieno.ServedPlane(server.socket, SHAPE, pool, engine="two")
    assert server.status()["refused_calls"] == 5


def test_a_server_that_is_killed_is_a_miss_until_it_is_back(server):
    one = Engine(server, "one")
    one.store(KEYS)
    found = one.catalog.acquire(one.space, KEYS)
    assert one.catalog.pin(one.space, KEYS, 3600) == ("accepted", None, 1)
    plane, kv = one.ranks[0].plane, one.ranks[0].kv
    job = plane.begin_load(found.files, list(range(6)))
    server.kill()
    kv[:] = 7
    with pytest.raises(ripieno.LostError):
        plane.start(job, 0, layers=SHAPE.layers)
    (report,) = plane.end([job])
    # At once: no call waits for an answer.
    assert "lost" in report.error and "no answer" not in report.error
    assert not kv[:, :6].any() and (kv[:, 6:] == 7).all()
    with pytest.raises(ripieno.LostError):
        plane.begin_load(found.files, list(range(6)))
    assert one.load(KEYS) == 0
    assert one.catalog.begin(one.space, KEYS).accepted == 0
    assert one.catalog.pin(one.space, KEYS, 60) == ("missing", "the server is away", None)
    server.start()
    until(lambda: one.load(KEYS) == 6, "it does not connect again")
    # Its pins are gone with it.
    assert not one.catalog.unpin(1) and server.status()["pins"] == 0
    with pytest.raises(ripieno.InvalidError, match="not, or no longer"):
        plane.begin_load(found.files, list(range(6)))
    one.catalog.release(found.id)
    with pytest.raises(ripieno.NotFoundError, match="start a server"):
        ripieno.ServedCatalog("absent", SHAPE, engine="two")
