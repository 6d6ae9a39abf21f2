"""Handles that are left when their store, a function or the interpreter ends, and forks."""

import contextlib
import gc
import hashlib
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import replace

import numpy
import pytest
from serving import Server

import ripieno

SHAPE = ripieno.Shape(layers=3, segments=1, object_bytes=4096, block_tokens=16)
BLOCKS = 16
CAPACITY = 32 << 20
WATCHDOG = 600
"""Seconds after which a process that does not end is killed. No test takes long by itself: what
waits for a thread that is gone would do so for ever."""


def keys(*numbers):
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


def open_store(path, pool=None):
    kv = numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)
    pool = pool or ripieno.Pool.contiguous(kv, SHAPE)
    return ripieno.Store(path, SHAPE, pool, capacity=CAPACITY)


def filled(path):
    """Returns a store that has the keys 0 to 2, and a change that only sync() or a close makes
    durable: the last one is removed."""
    store = open_store(path)
    with store.store(keys(0, 1, 2), [0, 1, 2]) as request:
        request.move_all()
        assert request.commit() == 3
    assert store.remove(keys(2)) == 1
    return store


def was_closed(path):
    """Returns true if the store was closed in order. It can be opened in any case."""
    with open_store(path) as store:
        with store.load(keys(0, 1), [0, 1]) as request:
            assert request.blocks == 2, "what was committed is there"
            request.move_all()
        assert store.lookup(keys(10)) == 0, "what was not committed is not"
        return store.lookup(keys(0, 1, 2)) == 2


def started(request):
    request.start(1)
    return request


def moved(request):
    request.move_all()
    return request


HANDLES = {
    "handle": lambda store: store.within(ripieno.Namespace(adapter="other")),
    "hold": lambda store: store.hold(keys(0, 1)),
    "load": lambda store: store.load(keys(0, 1), [3, 4]),
    "started load": lambda store: started(store.load(keys(0, 1), [5, 6])),
    "moved load": lambda store: moved(store.load(keys(0, 1), [7, 8])),
    "store": lambda store: store.store(keys(10), [9]),
    "started store": lambda store: started(store.store(keys(11), [10])),
    "moved store": lambda store: moved(store.store(keys(12), [11])),
}


@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_keeps_its_store_open(tmp_path, name):
    store = filled(tmp_path / "kv")
    handle = HANDLES[name](store)
    del store
    gc.collect()
    with pytest.raises(ripieno.LockedError):
        open_store(tmp_path / "kv")
    if isinstance(handle, ripieno.Request) and "started" not in name:
        handle.move_all()
    if name == "store":
        assert handle.commit() == 1
        with open_store(tmp_path / "kv") as store:
            assert store.lookup(keys(10)) == 1
            store.remove(keys(10))
    del handle
    gc.collect()
    assert was_closed(tmp_path / "kv")


@pytest.mark.parametrize("name", HANDLES)
def test_a_handle_may_go_first_or_after_the_close(tmp_path, name):
    store = filled(tmp_path / "kv")
    handle = HANDLES[name](store)
    del handle
    handle = HANDLES[name](store)
    store.close()
    assert was_closed(tmp_path / "kv")
    with contextlib.suppress(AttributeError):
        handle.end()


def test_a_function_may_return_in_any_order(tmp_path):
    def fails(path, *names):
        store = filled(path)
        handles = [HANDLES[name](store) for name in names]
        raise RuntimeError(str(len(handles)))

    def returns(path, name):
        store = filled(path)
        return HANDLES[name](store)

    with pytest.raises(RuntimeError, match=str(len(HANDLES))):
        fails(tmp_path / "a", *HANDLES)
    gc.collect()
    assert was_closed(tmp_path / "a")
    request = returns(tmp_path / "b", "load")
    request.move_all()
    request.end()
    gc.collect()
    assert was_closed(tmp_path / "b")


def test_a_thread_may_use_what_another_one_drops(tmp_path):
    store = filled(tmp_path / "kv")
    request = store.load(keys(0, 1), [0, 1])
    rounds = []

    def use(request):
        request.move_all()
        while len(rounds) < 100:
            request.poll(0)
            rounds.append(None)

    thread = threading.Thread(target=use, args=(request,))
    thread.start()
    del store, request
    thread.join()
    del thread
    gc.collect()
    assert was_closed(tmp_path / "kv")


# Ends of scripts that have a store and all its handles, with the exit code; true if the interpreter
# gets to close the store.
ENDS = {
    "the last line": ("", 0, True),
    "an exception": ("raise RuntimeError('ended')", 1, True),
    "an exit": ("sys.exit(3)", 3, True),
    "an interrupt": ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", -2, True),
    "an interrupt of a thread that waits": (
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "while True: handles[2].move_all(); handles[2] = HANDLES['load'](store)",
        -2,
        True,
    ),
    "a termination": ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -15, False),
    "a termination that is handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
        4,
        True,
    ),
    "an exit without an end": ("os._exit(5)", 5, False),
    "an exit of a thread": (
        "thread = threading.Thread(target=sys.exit, args=(6,)); thread.start(); thread.join()",
        0,
        True,
    ),
    "an exit of a thread that has the handles": (
        "def end(*handles): sys.exit(6)\n"
        "thread = threading.Thread(target=end, args=(store, *handles)); del store, handles\n"
        "thread.start(); thread.join(); del thread",
        0,
        True,
    ),
    "an exception of a thread": (
        "def end(*handles): raise RuntimeError\n"
        "threading.Thread(target=end, args=(store, *handles)).start()",
        0,
        True,
    ),
    "a daemon that goes on": (
        "def run(store):\n"
        "    while True: HANDLES['moved load'](store).end()\n"
        "threading.Thread(target=run, args=(store,), daemon=True).start()",
        0,
        False,
    ),
    "a thread that goes on for a while": (
        "def run():\n"
        "    for _ in range(100): HANDLES['moved load'](store).end()\n"
        "threading.Thread(target=run).start()\n"
        "raise RuntimeError",
        1,
        True,
    ),
    "a circle": ("circle = [store, handles]; circle.append(circle); del store, handles", 0, True),
    "deleted": ("del store; del handles; print('deleted', flush=True)", 0, True),
    "deleted, the handles first": ("del handles; del store", 0, True),
    "closed": ("store.close()", 0, True),
    "the end of a child": (
        "child = os.fork()\nif child: os.waitpid(child, 0)",
        0,
        True,
    ),
    "the exit of a child": (
        "child = os.fork()\nif child == 0: sys.exit(1)\nassert os.waitpid(child, 0)[1] == 256",
        0,
        True,
    ),
    "an exception of a child": (
        "with store:\n"
        "    child = os.fork()\n"
        "    if child == 0: raise RuntimeError\n"
        "assert os.waitpid(child, 0)[1] == 256",
        0,
        True,
    ),
    "a child that lives longer": (
        "ours, theirs = os.pipe(); child = os.fork()\n"
        "if child: os.close(ours); store.close(); os.write(theirs, b'x'); os.waitpid(child, 0)\n"
        "else: os.read(ours, 1); open_store(sys.argv[1]).close(); os._exit(0)",
        0,
        True,
    ),
}


def run(path, *lines, script=""):
    """Runs a script in an interpreter of its own. Returns its exit code, and what it wrote."""
    # A shell has a process in the background ignore it, and Python then has no handler of its own.
    interrupt = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    head = ["import os, signal, sys, threading", interrupt, "from test_ends import *", *lines]
    command = [sys.executable, "-c", "\n".join([*head, script]), str(path)]
    folder = os.path.dirname(__file__)
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=WATCHDOG, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("end", ENDS)
def test_an_interpreter_ends_with_its_handles(tmp_path, end):
    script, code, closes = ENDS[end]
    opened = (
        "store = filled(sys.argv[1])",
        "handles = [make(store) for make in HANDLES.values()]",
    )
    ended, said = run(tmp_path / "kv", *opened, script=script)
    assert ended == code, said
    closed = was_closed(tmp_path / "kv")
    assert closed or not closes, said


class Rank:
    """A catalog, and the plane of its only rank."""

    def __init__(self, path):
        (rank,) = ripieno.prepare(path, SHAPE, capacity=CAPACITY)
        self.catalog = ripieno.Catalog(path)
        kv = numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)
        self.plane = ripieno.Plane(path, rank, SHAPE, ripieno.Pool.contiguous(kv, SHAPE))
        self.space = self.catalog.namespace(ripieno.Namespace())
        self.write = self.catalog.begin(self.space, keys(0, 1))
        self.job = self.plane.begin_store(self.write.files, [0, 1])

    def store(self):
        for layer in range(SHAPE.layers):
            self.plane.start(self.job, layer)
        (report,) = self.plane.end([self.job])
        assert self.catalog.written(self.write.id, 0, report.checksums)
        self.catalog.commit(self.write.id)


@pytest.mark.parametrize("order", ["catalog, plane", "plane, catalog"])
@pytest.mark.parametrize("state", ["begun", "started", "stored"])
def test_an_interpreter_ends_with_its_rank(tmp_path, order, state):
    act = {"begun": "", "started": "rank.plane.start(rank.job, 0)", "stored": "rank.store()"}
    script = f"rank = Rank(sys.argv[1])\n{act[state]}\n"
    first, second = order.split(", ")
    script += f"{first} = rank.{first}; {second} = rank.{second}; del rank\n"
    ended, said = run(tmp_path / "kv", script=script + "raise RuntimeError('ended')")
    assert ended == 1 and "ended" in said, said
    with ripieno.Catalog(tmp_path / "kv") as catalog:
        space = catalog.namespace(ripieno.Namespace())
        assert catalog.lookup(space, keys(0, 1)) == (2 if state == "stored" else 0)


class Engine:
    """An engine that uses the store of a server."""

    def __init__(self, socket):
        self.memory = ripieno.SharedMemory(SHAPE.rows * BLOCKS * SHAPE.object_bytes)
        pool = ripieno.Pool.contiguous(self.memory.buffer, SHAPE)
        pool = replace(pool, file=self.memory.file)
        engine = f"engine {os.getpid()}"
        self.catalog = ripieno.ServedCatalog(socket, SHAPE, engine=engine)
        self.plane = ripieno.ServedPlane(socket, SHAPE, pool, engine=engine)
        self.space = self.catalog.namespace(ripieno.Namespace())
        self.write = self.catalog.begin(self.space, keys(0, 1))
        self.found = self.catalog.acquire(self.space, keys(0))
        self.job = self.plane.begin_store(self.write.files, [0, 1])


@pytest.mark.parametrize("order", ["catalog, plane", "plane, catalog"])
@pytest.mark.parametrize("end", ["", "raise RuntimeError", "sys.exit()"])
def test_an_interpreter_ends_with_a_server(tmp_path, order, end):
    with Server(tmp_path, SHAPE) as server:
        first, second = order.split(", ")
        script = "engine = Engine(sys.argv[1])\nengine.plane.start(engine.job, 0)\n"
        script += f"{first} = engine.{first}; {second} = engine.{second}; del engine\n{end}"
        ended, said = run(os.path.abspath(server.socket), script=script)
        assert ended == (1 if "raise" in end else 0), said
        assert server.settled()["sessions"] == []


# The arguments of all methods but the releases.
ARGUMENTS = {
    ripieno.Store: {
        "within": (ripieno.Namespace(),),
        "lookup": (keys(0),),
        "are_stored": (keys(0),),
        "prefetch": (keys(0),),
        "hold": (keys(0),),
        "load": (keys(0), [0]),
        "store": (keys(9), [0]),
        "pin": (keys(0), 1),
        "unpin": (1,),
        "remove": (keys(0),),
        "take_dropped": (),
        "clear": (),
        "evict": (1,),
        "bump_epoch": (),
        "sync": (),
        "poll_events": (),
        "usage": (),
        "counts": (),
        "stats": (),
    },
    ripieno.Request: {
        "start": (0,),
        "wait": (0,),
        "poll": (0,),
        "move_all": (),
        "commit": (),
    },
    ripieno.Held: {},
    ripieno.Catalog: {
        "rank": (0,),
        "namespace": (ripieno.Namespace(),),
        "lookup": (0, keys(0)),
        "are_stored": (0, keys(0)),
        "state_of": (0, keys(0)[0]),
        "files": (0, keys(0)),
        "acquire": (0, keys(0)),
        "release": (0,),
        "checksums": ([0], 0),
        "begin": (0, keys(0)),
        "written": (0, 0, b""),
        "failed": (0, 0),
        "commit": (0,),
        "abort": (0,),
        "lost": ([0],),
        "pin": (0, keys(0), 1),
        "unpin": (1,),
        "remove": (0, keys(0)),
        "take_dropped": ([0],),
        "clear": (0,),
        "evict": (1,),
        "bump_epoch": (0,),
        "set_quota": (0, None),
        "usage": (0,),
        "stats": (),
        "sync": (),
    },
    ripieno.Plane: {
        "begin_store": ([0], [0]),
        "begin_load": ([0], [0]),
        "begin_step": (1,),
        "end_step": (1, 1.0),
        "hurry": (0,),
        "announce": (0, [0]),
        "forget": ([],),
        "withdraw": (0, True),
        "start": (0, 0),
        "join": (0, 0, 0),
        "wait": (0, 0),
        "poll": (0, 0),
        "end": ([0],),
        "take_lost": (),
        "poll_events": (),
        "stats": (),
    },
}
# A server's have the methods of a store's own.
for own, served in [
    (ripieno.Catalog, ripieno.ServedCatalog),
    (ripieno.Plane, ripieno.ServedPlane),
]:
    methods = ARGUMENTS[own].items()
    ARGUMENTS[served] = {name: given for name, given in methods if hasattr(served, name)}
RELEASES = {"close", "end"}
"""Methods that have nothing left to do for a closed handle, and raise nothing."""
PLAIN = {"blocks", "found", "connect"}
"""Attributes that are the handle's own values, or make another handle."""


def refusals(handles, why):
    """Calls every method and reads every attribute of these handles, which must raise ClosedError
    with this text. Returns what is wrong."""
    wrong = []
    for handle in handles:
        arguments = ARGUMENTS[type(handle)]
        members = dict(inspect.getmembers(type(handle)))
        public = {name for name in members if not name.startswith("_")} - PLAIN
        for name in sorted(public | arguments.keys()):
            call = f"{type(handle).__name__}.{name}"
            is_method = callable(members[name])
            if is_method and name not in arguments:
                if name in RELEASES:
                    getattr(handle, name)()
                else:
                    wrong.append(f"{call} is not tested")
                continue
            try:
                found = getattr(handle, name)
                if is_method:
                    found = found(*arguments[name])
            except ripieno.ClosedError as error:
                if why not in str(error):
                    wrong.append(f"{call}: {error}")
            except Exception as error:
                wrong.append(f"{call}: {error!r}")
            else:
                wrong.append(f"{call} returned {found!r}")
        if hasattr(type(handle), "__exit__"):
            with handle:
                pass
    return wrong


def forked_refusals(handles):
    return refusals(handles, f"process {os.getppid()}, of which this one is a fork")


def test_a_closed_store_answers_nothing(tmp_path):
    store = filled(tmp_path / "kv")
    handles = [store, *(make(store) for make in HANDLES.values())]
    store.close()
    assert refusals(handles, " was closed") == []


def test_a_closed_rank_answers_nothing(tmp_path):
    rank = Rank(tmp_path / "kv")
    rank.plane.close()
    rank.catalog.close()
    assert refusals([rank.catalog, rank.plane], "it was closed") == []


def test_a_closed_session_answers_nothing(tmp_path):
    with Server(tmp_path, SHAPE) as server:
        engine = Engine(server.socket)
        engine.plane.close()
        engine.catalog.close()
        assert refusals([engine.catalog, engine.plane], "it was closed") == []


def in_a_fork(act, *arguments):
    """Calls a function in a forked process, and checks that it returns nothing wrong."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(WATCHDOG)
        try:
            wrong = "\n".join(act(*arguments) or ())
        except BaseException:
            wrong = traceback.format_exc()
        del arguments
        gc.collect()
        os.write(theirs, wrong.encode()[:60000])
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        wrong = pipe.read()
    assert os.waitpid(child, 0) == (child, 0)
    assert not wrong, wrong


def test_a_forked_process_cannot_use_a_store(tmp_path):
    store = filled(tmp_path / "kv")
    handles = [store, *(make(store) for make in HANDLES.values())]
    in_a_fork(forked_refusals, handles)
    # The parent's are as they were.
    by_name = dict(zip(HANDLES, handles[1:]))
    by_name["load"].move_all()
    by_name["store"].move_all()
    assert by_name["store"].commit() == 1
    store.remove(keys(10))
    assert by_name["moved store"].commit() == 1
    store.close()
    assert was_closed(tmp_path / "kv")


def test_a_forked_process_cannot_use_a_rank(tmp_path):
    rank = Rank(tmp_path / "kv")
    rank.plane.start(rank.job, 0)
    in_a_fork(forked_refusals, [rank.catalog, rank.plane])
    for layer in (1, 2):
        rank.plane.start(rank.job, layer)
    (report,) = rank.plane.end([rank.job])
    assert rank.catalog.written(rank.write.id, 0, report.checksums)
    rank.catalog.commit(rank.write.id)
    assert rank.catalog.lookup(rank.space, keys(0, 1)) == 2
    rank.plane.close()
    rank.catalog.close()


def test_a_forked_process_cannot_use_a_session(tmp_path):
    with Server(tmp_path, SHAPE) as server:
        engine = Engine(server.socket)
        engine.plane.start(engine.job, 0)
        in_a_fork(forked_refusals, [engine.catalog, engine.plane])
        for layer in (1, 2):
            engine.plane.start(engine.job, layer)
        (report,) = engine.plane.end([engine.job])
        assert report.error is None
        assert engine.catalog.written(engine.write.id, 0, b"")
        assert engine.catalog.commit(engine.write.id)

        def another(socket):
            # A session of its own works.
            with ripieno.ServedCatalog(socket, SHAPE, engine="another") as catalog:
                found = catalog.lookup(catalog.namespace(ripieno.Namespace()), keys(0, 1))
            return [] if found == 2 else [f"{found} blocks were found"]

        in_a_fork(another, os.path.abspath(server.socket))
        engine.plane.close()
        engine.catalog.close()


def test_a_forked_process_may_open_a_store_of_its_own(tmp_path):
    store = filled(tmp_path / "kv")

    def own(folder):
        filled(folder / "own").close()
        assert was_closed(folder / "own")
        with pytest.raises(ripieno.LockedError):
            open_store(folder / "kv")

    in_a_fork(own, tmp_path)
    store.close()
    in_a_fork(lambda path: [] if was_closed(path) else ["it was not closed"], tmp_path / "kv")
    assert was_closed(tmp_path / "own")


FORKED = []


def worker(pipe):
    signal.alarm(WATCHDOG)
    pipe.send(forked_refusals(FORKED))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_worker_of_multiprocessing_that_was_forked_is_refused(tmp_path):
    context = multiprocessing.get_context("fork")
    store = filled(tmp_path / "kv")
    FORKED[:] = [store, *(make(store) for make in HANDLES.values())]
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == []
    process.join()
    assert process.exitcode == 0
    FORKED.clear()
    del store
    gc.collect()
    assert was_closed(tmp_path / "kv")
