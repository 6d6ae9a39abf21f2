"""Objects in the store of a server, as caches of LMCache and SGLang keep them."""

import logging

import numpy
import pytest
from serving import Server
from waiting import until

import ripieno
from ripieno.objects import Object, Objects, Options

SHAPE = ripieno.Shape(layers=2, segments=2, object_bytes=4096, block_tokens=16)
PIECE = SHAPE.rows * SHAPE.object_bytes
SIZE = 5 * PIECE // 2

logger = logging.getLogger("test")


def content(number):
    return numpy.random.default_rng(number).integers(0, 256, SIZE, numpy.uint8)


class User:
    """A cache with objects of two pieces and a half."""

    def __init__(self, server, space="one", pieces=16):
        options = Options.parse({"server": server.socket, "buffer": pieces * PIECE}, "test")
        self.objects = Objects(options, "test", logger)
        self.space = self.objects.all.within(ripieno.Namespace(layout=space))

    def named(self, numbers, memory):
        piece = self.objects.piece
        return [
            Object.named(self.space, [number], SIZE, piece, each.ctypes.data)
            for number, each in zip(numbers, memory, strict=True)
        ]

    def store(self, *numbers):
        memory = [content(number) for number in numbers]
        return self.objects.store(self.named(numbers, memory))

    def load(self, *numbers):
        """Returns which objects arrived, with their own bytes."""
        memory = [numpy.zeros(SIZE, numpy.uint8) for _ in numbers]
        arrived = self.objects.load(self.named(numbers, memory))
        for number, each, is_there in zip(numbers, memory, arrived, strict=True):
            assert not is_there or (each == content(number)).all(), "wrong bytes"
        return arrived


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, SHAPE) as server:
        yield server


def test_caches_share_objects(server):
    one, other, apart = User(server), User(server), User(server, "another")
    assert one.objects.piece == PIECE
    assert one.store(*range(10)) == list(range(10))
    assert other.load(*range(12)) == [True] * 10 + [False] * 2
    assert other.store(8, 9, 10) == [2], "the others are there"
    assert one.load(10) == [True] and apart.load(0) == [False]
    (first,) = one.named([0], [content(0)])
    with other.space.hold(first.keys) as held:
        assert held.blocks == 3
        assert other.space.remove(first.keys) == 3
    assert one.load(0, 1) == [False, True]
    assert one.space.usage().stored == 10 * 3 == one.objects.all.counts().stored
    with pytest.raises(ripieno.InvalidError, match="ripieno ctl"):
        one.space.clear()
    for user in (one, other, apart):
        user.objects.close()
    status = server.settled()
    assert (status["files_referenced"], status["files_writing"]) == (0, 0)
    assert status["refused_calls"] == 0


def test_the_least_useful_objects_are_evicted(server):
    one = User(server, pieces=512)
    for number in range(0, 1600, 100):
        one.store(*range(number, number + 100))
    assert sum(one.load(*range(1200, 1600))) > 200
    assert one.objects.all.counts().evicted > 0
    one.objects.close()


def test_a_server_that_is_killed_is_a_miss_until_it_is_back(server):
    one = User(server)
    one.store(1, 2)
    server.kill()
    assert one.load(1, 2) == [False, False]
    with pytest.raises(ripieno.LostError):
        one.store(3)
    server.start()
    until(lambda: one.load(1, 2) == [True, True], "it does not connect again")
    assert one.store(3) == [0]
    assert one.objects.dead is None
    one.objects.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "kv"}, "test: path was given beside server"),
        ({"piece": 4096, "devices": 2}, "test: devices, piece was given beside server"),
        ({"buffer": 3 * PIECE}, f"4 pieces of {PIECE} bytes"),
    ],
)
def test_parameters_of_a_store_of_its_own_are_refused(server, given, message):
    with pytest.raises(ValueError, match=message):
        Objects(Options.parse({"server": server.socket} | given, "test"), "test", logger)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ripieno.NotFoundError, match="absent"):
        Objects(Options.parse({"server": "absent"}, "test"), "test", logger)


@pytest.fixture(params=["store", "server"])
def connect(request, tmp_path):
    """Returns a function that opens a cache, with the namespace of a name: of a store of its own, or
    another client of a server."""

    def made(given):
        objects = Objects(Options.parse(given | {"buffer": 16 * PIECE}, "test"), "test", logger)
        return objects, lambda name: objects.all.within(ripieno.Namespace(tenant_salt=name))

    if request.param == "server":
        server = request.getfixturevalue("server")
        yield lambda: made({"server": server.socket})
    else:
        only = made({"path": str(tmp_path / "kv"), "capacity": "16MiB", "piece": PIECE})
        yield lambda: only
        only[0].close()


@pytest.mark.parametrize("size", [1, 5, PIECE - 1, PIECE, PIECE + 1])
def test_a_last_piece_has_nothing_of_others(connect, size):
    one, space_of = connect()
    secret = numpy.full(16 * PIECE, 0x5E, numpy.uint8)
    theirs = Object.named(space_of(b"theirs"), [0], len(secret), PIECE, secret.ctypes.data)
    assert one.store([theirs]) == [0]
    ours = []
    for number in range(8):
        memory = numpy.full(size, 0xA0 + number, numpy.uint8)
        ours.append((memory, Object.named(space_of(b"ours"), [number], size, PIECE, 0)))
        placed = Object.named(space_of(b"ours"), [number], size, PIECE, memory.ctypes.data)
        assert one.store([placed]) == [0]
        # Loads leave their bytes in the buffer, too.
        assert one.load([theirs]) == [True]
    other, space_of = connect()
    view = numpy.frombuffer(other.memory, numpy.uint8)
    for memory, each in ours:
        view[:] = 0xFF
        count = len(each.keys)
        with space_of(b"ours").load(each.keys, list(range(count))) as load:
            assert load.blocks == count
            load.move_all()
        assert (view[:size] == memory).all()
        assert (view[size : count * PIECE] == 0).all(), "bytes of somebody else"
    if other is not one:
        del view
        for each in (one, other):
            each.close()
