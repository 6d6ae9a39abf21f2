"""The NIXL backend, through NIXL's own agent. Each of its users is a process of its own."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import time
import traceback
from multiprocessing import get_context

import numpy as np
import pytest
import ripieno

PLUGIN = os.environ.get("RIPIENO_NIXL")
"""The folder of the backend's library, which `cargo xtask engine` builds."""
NIXL = importlib.util.find_spec("nixl")
pytestmark = [
    pytest.mark.skipif(NIXL is None, reason="NIXL is not installed"),
    pytest.mark.skipif(PLUGIN is None, reason="RIPIENO_NIXL does not name the backend's folder"),
]

needs_a_server = pytest.mark.skipif(
    "RIPIENO_PROGRAM" not in os.environ, reason="RIPIENO_PROGRAM does not name `ripieno`"
)

SIZE, ROWS = 64 << 10, 48
SHAPE = ripieno.Shape(layers=1, segments=1, object_bytes=SIZE, block_tokens=1)
SECONDS = 600
"""Time after which a wait is a hang, on any machine."""


def data(name, version=0):
    """Returns the bytes of an object."""
    seed = [version, *name.encode()]
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


class User:
    """An agent of NIXL with our backend, and registered memory: [row, byte]."""

    def __init__(self, path, backend="RIPIENO", telemetry=False, **params):
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(backends=[], capture_telemetry=telemetry)
        self.agent = nixl_agent("user", config)
        self.backend = backend
        own = {} if "server" in params else {"path": str(path), "capacity": "16MiB"}
        self.agent.create_backend(backend, own | {"object_bytes": str(SIZE)} | params)
        self.memory = np.zeros((ROWS, SIZE), np.uint8)
        self.last = 0
        self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")

    def start(self, how, names, size=SIZE, offset=0):
        """Returns a transfer of objects from or to the first rows, and their registration."""
        # NIXL tells objects apart by their numbers.
        numbers = range(self.last, self.last + len(names))
        self.last += len(names)
        objects = [(0, SIZE, number, name) for number, name in zip(numbers, names, strict=True)]
        registered = self.agent.register_memory(objects, "OBJ")
        rows = [(row.ctypes.data, size, 0) for row in self.memory[: len(names)]]
        local = self.agent.get_xfer_descs(rows, "DRAM")
        parts = [(offset, size, number) for number in numbers]
        remote = self.agent.get_xfer_descs(parts, "OBJ")
        return self.agent.initialize_xfer(how, local, remote, "user"), registered

    def end(self, handle, registered):
        """Waits for a transfer, and returns "DONE" or the error."""
        until = time.monotonic() + SECONDS
        try:
            state = self.agent.transfer(handle)
            while state == "PROC":
                assert time.monotonic() < until, "the transfer does not end"
                state = self.agent.check_xfer_state(handle)
        except Exception as error:
            state = str(error)
        self.agent.release_xfer_handle(handle)
        self.agent.deregister_memory(registered)
        return state

    def move(self, how, names, **more):
        try:
            started = self.start(how, names, **more)
        except Exception as error:
            return str(error)
        return self.end(*started)

    def write(self, names, version=0):
        for row, name in zip(self.memory, names, strict=False):
            row[:] = data(name, version)
        return self.move("WRITE", names)

    def read(self, names, version=0):
        """Returns the state. Bytes that arrived are right."""
        self.memory[:] = 0
        state = self.move("READ", names)
        if state == "DONE":
            for row, name in zip(self.memory, names, strict=False):
                assert np.array_equal(row, data(name, version)), name
        return state

    def has(self, names):
        objects = [(0, SIZE, number, name) for number, name in enumerate(names)]
        found = self.agent.query_memory(objects, self.backend, "OBJ")
        return [each is not None for each in found]


def _run(into, log, plugins, body, args):
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["NIXL_PLUGIN_DIR"] = str(plugins)
    try:
        into.send((body(*args), None))
    except BaseException:
        into.send((None, traceback.format_exc()))


@pytest.fixture
def life(tmp_path):
    """Returns body(*args), run in a new process; its output is in life.said."""

    def run(body, *args, plugins=PLUGIN):
        result, into = get_context("spawn").Pipe(duplex=False)
        log = tmp_path / "log"
        child = get_context("spawn").Process(target=_run, args=(into, log, plugins, body, args))
        child.start()
        into.close()
        try:
            value, error = result.recv() if result.poll(2 * SECONDS) else (None, "it hung")
        except EOFError:
            value, error = None, None
        child.join(SECONDS)
        child.kill()
        run.said = log.read_text()
        assert error is None, f"{run.said[-4000:]}\n{error}"
        return value

    return run


def names(count, begin="model/layer"):
    return [f"{begin}/{number}" for number in range(count)]


def _stores(path, params):
    user = User(path, telemetry=True, **params)
    kinds = user.agent.get_backend_mem_types("RIPIENO")
    assert user.write(["", "", ""]) == "DONE", "their names are 0, 1 and 2"
    assert user.write(names(40)) == "DONE"
    return user.has(names(41)), sorted(map(str, kinds))


def _finds(path, params):
    user = User(path, **params)
    assert user.has([*names(2), "other", "1", "3"]) == [True, True, False, True, False]
    user.memory[:] = 0
    assert user.move("READ", ["0", "1"]) == "DONE"
    assert all(np.array_equal(row, data("")) for row in user.memory[:2])
    return user.read(names(40))


@pytest.mark.parametrize("buffer", ["64MiB", str(6 * SIZE)])
def test_a_restart_finds_everything(tmp_path, life, buffer):
    """With a small buffer, a transfer is moved in 14 batches."""
    params = {"buffer": buffer}
    found, kinds = life(_stores, tmp_path / "kv", params)
    assert found == [True] * 40 + [False]
    assert len(kinds) == 2
    assert life(_finds, tmp_path / "kv", params) == "DONE"


def _replaces(path):
    user = User(path)
    assert user.write(names(3)) == "DONE"
    assert user.write(names(2), version=1) == "DONE"
    assert user.read(names(2), version=1) == "DONE"
    return user.read(names(3)[2:])


def test_a_second_write_replaces_the_object(tmp_path, life):
    assert life(_replaces, tmp_path / "kv") == "DONE"


def _errs(path):
    user = User(path)
    assert user.write(names(2)) == "DONE"
    states = [
        user.read([*names(2), "absent"]),
        user.move("READ", names(1), size=SIZE // 2),
        user.move("READ", names(1), size=SIZE // 2, offset=SIZE // 2),
        user.move("WRITE", ["a", "b", "a"]),
    ]
    try:
        user.agent.register_memory([(0, SIZE, 1, "")], "FILE")
    except Exception as error:
        states.append(str(error))
    assert user.read(names(2)) == "DONE", "it goes on"
    return states


def test_errors(tmp_path, life):
    found = life(_errs, tmp_path / "kv")
    wanted = ["NOT_FOUND", "MISMATCH", "MISMATCH", "INVALID_PARAM", "NOT_FOUND"]
    assert [each for each, word in zip(found, wanted, strict=True) if word not in each] == []
    assert f"a transfer of {SIZE // 2} bytes at {SIZE // 2} was asked for" in life.said
    assert "a transfer writes an object twice" in life.said


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"object_bytes": "0"}, "path, capacity and object_bytes must be given"),
        ({"capacity": "16 apples"}, 'capacity: "16 apples" was given; expected a number'),
        ({"capacity": "99999999999999TiB"}, "more than 16 EiB"),
        ({"capacitie": "1"}, "there is no such option; capacity is the nearest"),
        ({"buffer": str(SIZE)}, "give a larger buffer or smaller objects"),
        ({"devices": "65"}, "a number of files, 1 to 64"),
        ({"path": ""}, "path, capacity and object_bytes must be given, or server and object_bytes"),
        ({"server": "sock", "capacity": "1MiB"}, "leave out these"),
        ({"server": "sock", "object_bytes": "0"}, "or server and object_bytes"),
        ({"server": "absent"}, "absent"),
        ({"path": "/nowhere/kv"}, "name a directory whose parent exists"),
    ],
)
def test_wrong_parameters(tmp_path, life, params, words):
    life(_is_refused, {"path": str(tmp_path / "kv")} | params)
    assert words in life.said


def _is_refused(params):
    with pytest.raises(Exception, match="BACKEND"):
        User(**params)


def test_a_store_in_use_is_refused(tmp_path, life):
    life(_opens_twice, tmp_path / "kv")
    assert "the store is in use by process" in life.said


def _opens_twice(path):
    user = User(path)
    with pytest.raises(Exception, match="BACKEND"):
        User(path)
    return user.write(names(1))


def _shares_a_server(directory):
    from serving import Server

    with Server(directory, SHAPE) as server:
        params = {"server": server.socket, "buffer": str(6 * SIZE)}
        one, other = (User(None, **params) for _ in range(2))
        assert one.write(names(40)) == "DONE"
        assert other.has(names(41)) == [True] * 40 + [False]
        assert other.read(names(40)) == "DONE"
        assert other.write(names(3), version=1) == "DONE", "in place of the first"
        assert one.read(names(3), version=1) == "DONE"
        server.kill()
        lost = [one.read(names(3)), one.write(["more"]), other.read(names(3))]
        with pytest.raises(Exception, match="BACKEND"):
            one.has(names(1))
        server.start()
        for user in (one, other):
            # A transfer connects again.
            assert user.read(names(3), version=1) == "DONE"
            assert user.has(["more", *names(3)]) == [False, True, True, True]
        assert one.write(["more"]) == "DONE" and other.read(["more"]) == "DONE"
        status = server.status()
        files = {each["label"]: each["files"] for each in status["namespaces"]}
        return lost, files, len(status["sessions"])


@needs_a_server
def test_agents_share_a_server_that_is_killed(tmp_path, life):
    lost, files, sessions = life(_shares_a_server, tmp_path)
    assert all("BACKEND" in each for each in lost)
    assert (files, sessions) == ({"": 0, "nixl": 41}, 2)
    assert "the server is lost" in life.said


def _writes_what_another_one_writes(directory):
    from serving import Server

    with Server(directory, SHAPE) as server:
        user = User(None, server=server.socket, buffer=str(6 * SIZE))
        catalog = ripieno.ServedCatalog(server.socket, SHAPE, engine="another")
        space = catalog.namespace(ripieno.Namespace(layout="nixl", label="nixl"))
        write = catalog.begin(space, [hashlib.sha256(b"2").digest()])
        assert write.accepted == 1
        refused = user.write(["1", "2", "3"])
        there = user.has(["1", "2", "3"])
        catalog.abort(write.id)
        return refused, there, user.write(["1", "2", "3"]), user.read(["1", "2", "3"])


@needs_a_server
def test_an_object_that_another_one_is_writing_is_not_done(tmp_path, life):
    refused, there, *later = life(_writes_what_another_one_writes, tmp_path)
    assert "BACKEND" in refused
    assert (there, later) == ([True, False, True], ["DONE", "DONE"])
    assert "another agent is writing" in life.said


@needs_a_server
def test_a_server_of_other_objects_is_refused(tmp_path, life):
    from serving import Server

    with Server(tmp_path, dataclasses.replace(SHAPE, layers=2)) as server:
        life(_is_refused, {"path": None, "server": server.socket})
    assert "another shape (2 layers" in life.said


def _writes(path):
    return User(path).write(names(ROWS))


def _reads_each(path):
    user = User(path)
    return [user.read([name]) for name in names(ROWS)], user.has(names(ROWS))


def test_damaged_objects_are_errors_and_then_absent(tmp_path, life):
    assert life(_writes, tmp_path / "kv") == "DONE"
    image = tmp_path / "kv" / "device-0.img"
    with image.open("r+b") as file:
        # Beyond the journal, a byte in every third object.
        for at in range(2 << 20, (2 << 20) + ROWS * SIZE, 3 * SIZE):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))
    states, found = life(_reads_each, tmp_path / "kv")
    bad = [at for at, state in enumerate(states) if state != "DONE"]
    assert 0 < len(bad) <= ROWS // 3 + 1
    assert all("BACKEND" in states[at] for at in bad)
    assert [at for at, there in enumerate(found) if not there] == bad


def _loses_its_device(path):
    user = User(path)
    assert user.write(names(4)) == "DONE"
    os.truncate(path / "device-0.img", 4096)
    return user.read(names(4)), user.write(names(4, "more"))


def test_a_failed_device_is_an_error(tmp_path, life):
    read, _ = life(_loses_its_device, tmp_path / "kv")
    assert "BACKEND" in read


def _writes_forever(path, count):
    user = User(path)
    for number in range(10_000):
        assert user.write(names(4, f"round{number % 8}"), version=number // 8) == "DONE"
        (path / "written").write_text(str(number))
        if number >= count:
            os.kill(os.getpid(), signal.SIGKILL)


def _reads_rounds(path, last):
    user = User(path)
    for number in range(last - 7, last + 1):
        assert user.read(names(4, f"round{number % 8}"), version=number // 8) == "DONE", number


def test_a_kill_loses_nothing_that_was_written(tmp_path, life):
    path = tmp_path / "kv"
    life(_writes_forever, path, 100)
    life(_reads_rounds, path, int((path / "written").read_text()))


def _aborts(path):
    user = User(path, buffer=str(2 * SIZE))
    assert user.write(names(ROWS)) == "DONE"
    for _ in range(20):
        user.memory[:] = 0
        handle, registered = user.start("READ", names(ROWS))
        user.agent.transfer(handle)
        user.agent.release_xfer_handle(handle)
        user.agent.deregister_memory(registered)
        seen = user.memory.copy()
        time.sleep(0.01)
        assert np.array_equal(user.memory, seen), "memory changed after the release"
    return user.read(names(ROWS))


def test_a_released_transfer_touches_no_memory(tmp_path, life):
    assert life(_aborts, tmp_path / "kv") == "DONE"


def test_more_objects_than_there_is_room_for(tmp_path, life):
    assert life(_overflows, tmp_path / "kv") > 0


def _writes_more_than_fits(path):
    user = User(path, capacity="4MiB", buffer=str(4 * SIZE))
    assert user.write(names(8)) == "DONE"
    return user.write(names(ROWS, "more")), user.has(names(8))


def test_a_write_of_more_than_the_store_is_refused_before_it_costs_anything(tmp_path, life):
    refused, there = life(_writes_more_than_fits, tmp_path / "kv")
    assert "INVALID_PARAM" in refused and there == [True] * 8
    assert f"a transfer of {ROWS} objects was asked for; the store has room for" in life.said


def _overflows(path):
    user = User(path, capacity="4MiB", buffer=str(4 * SIZE))
    for begin in range(8):
        assert user.write(names(8, f"part{begin}")) == "DONE"
        assert user.read(names(8, f"part{begin}")) == "DONE"
    assert "NOT_FOUND" in user.read(names(8, "part0"))
    return user.has(names(8, "part0")).count(False)


PAGE = 4096


class Lmcache:
    """LMCache's nixl_store over our backend, with its memory: [page, byte]."""

    def __init__(self, path):
        from argparse import Namespace

        import torch
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        given = {
            "type": "nixl_store",
            "backend": "OBJ",
            "backend_params": {"path": str(path), "capacity": "16MiB", "object_bytes": str(PAGE)},
            "pool_size": 64,
        }
        (config,) = parse_args_to_l2_adapters_config(
            Namespace(l2_adapter=[json.dumps(given)])
        ).adapters
        self.memory = torch.zeros((64, PAGE), dtype=torch.uint8)
        memory = L1MemoryDesc(self.memory.data_ptr(), self.memory.numel(), PAGE)
        self.adapter = create_l2_adapter(config, l1_memory_desc=memory)

    def objects(self, first, count):
        """Returns LMCache's objects of 3 pages each, from a page on."""
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        made = []
        for page in range(first, first + 3 * count, 3):
            data = self.memory[page : page + 3].view(-1)
            # Its server has offsets as addresses.
            at = MemoryObjMetadata(
                data.shape, data.dtype, page * PAGE, 3 * PAGE, 1, fmt=MemoryFormat.KV_2LTD
            )
            made.append(TensorMemoryObj(data, at, parent_allocator=None))
        return made

    def wait(self, descriptor):
        assert select.select([descriptor], [], [], SECONDS)[0], "no event"
        os.eventfd_read(descriptor)


def _uses_lmcache(path):
    import torch
    from lmcache.v1.distributed.api import ObjectKey

    user = Lmcache(path)
    keys = [ObjectKey(bytes([number] * 8), "m", 0, 0, "") for number in range(9)]
    user.memory[:24] = torch.randint(0, 256, (24, PAGE), dtype=torch.uint8)
    task = user.adapter.submit_store_task(keys[:8], user.objects(0, 8))
    user.wait(user.adapter.get_store_event_fd())
    stored = user.adapter.pop_completed_store_tasks()[task].bytes_transferred()
    task = user.adapter.submit_lookup_and_lock_task(keys, {})
    user.wait(user.adapter.get_lookup_and_lock_event_fd())
    found = user.adapter.query_lookup_and_lock_result(task)
    found = [found.test(at) for at in range(9)]
    task = user.adapter.submit_load_task(keys[:8], user.objects(30, 8))
    user.wait(user.adapter.get_load_event_fd())
    loaded = user.adapter.query_load_result(task)
    loaded = [loaded.test(at) for at in range(8)]
    user.adapter.close()
    return stored, found, loaded, torch.equal(user.memory[:24], user.memory[30:54])


def test_lmcache_with_our_backend_as_theirs(tmp_path, life):
    """LMCache's nixl_store takes only NIXL's own names: ours is in the place of OBJ. (LMCache's
    check of adapters fails with nixl_store over every backend: it gives it other addresses than
    LMCache's server does.)"""
    pytest.importorskip("lmcache")
    (tmp_path / "libplugin_OBJ.so").symlink_to(pathlib.Path(PLUGIN) / "libplugin_RIPIENO.so")
    stored, found, loaded, equal = life(_uses_lmcache, tmp_path / "kv", plugins=tmp_path)
    assert stored == 8 * 3 * PAGE
    assert found == [True] * 8 + [False]
    assert loaded == [True] * 8
    assert equal


def test_the_interface_is_that_of_nixl():
    """The order of the virtual functions is that in the table of NIXL's own backend."""
    sources = pathlib.Path(__file__).parents[3] / "objstore/c/nixl"
    declared = re.findall(r"virtual \w+ (\w+)\(", (sources / "abi.h").read_text())
    packages = pathlib.Path(NIXL.origin).parents[1]
    theirs = next(packages.glob(".nixl_cu*.mesonpy.libs/plugins/libplugin_POSIX.so"))

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    (table,) = re.findall(
        r"^(\w+) (\w+) V vtable for nixlPosixEngine$", output("nm", "-DCS", theirs), re.MULTILINE
    )
    begin, size = (int(number, 16) for number in table)
    slots = {}
    for line in output("readelf", "-rWC", theirs).splitlines():
        found = re.match(r"(\w+)\s+\w+\s+R_X86_64_64\s+\w+\s+(.+?)(?: \+ 0)?$", line)
        if found and begin + 16 <= int(found[1], 16) < begin + size:
            slots[int(found[1], 16)] = re.sub(r"\(.*", "", found[2]).split("::")[-1]
    assert len(slots) == size // 8 - 2
    order = [slots[at] for at in sorted(slots)]
    destructors, rest = order[:2], order[2:]
    assert all(name.startswith("~") for name in destructors)
    assert rest == declared

    ours = output("nm", "-DC", "--defined-only", pathlib.Path(PLUGIN) / "libplugin_RIPIENO.so")
    assert re.findall(r" T (\w+)$", ours, re.MULTILINE) == ["nixl_plugin_fini", "nixl_plugin_init"]
