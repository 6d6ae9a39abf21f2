"""The L2 adapter for LMCache: their own check, and bytes after kills, faults and eviction."""

import hashlib
import importlib.util
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache")

import ripieno  # noqa: E402
import torch  # noqa: E402
from forked import register  # noqa: E402
from lmcache.v1.distributed import api  # noqa: E402
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from ripieno.lmcache import RipienoL2  # noqa: E402

PIECE = 64 << 10
# LMCache 0.5.7 moved its check.
CHECK = "lmcache.v1" if importlib.util.find_spec("lmcache.v1.check") else "lmcache.inprocess.v1"
make = importlib.import_module(f"{CHECK}.check.check_mode_test_l2_adapter")._create_memory_obj


def params(path, **more):
    return {"path": str(path), "capacity": "16MiB", "piece": PIECE, "buffer": "1MiB"} | more


def key(number, salt="", model="m"):
    return ObjectKey(number.to_bytes(8, "big"), model, 0, 0, salt)


def data(number, size=3 * PIECE // 4 * 2):
    """Returns an object: a piece and a half, with bytes of its own."""
    made = make(obj_size=size // 4)
    made.tensor.copy_(torch.rand(size // 4, generator=torch.Generator().manual_seed(number)))
    return made


def empty(size=3 * PIECE // 4 * 2):
    return make(obj_size=size // 4, fill_value=-1.0)


LAYOUT = MemoryLayoutDesc([torch.Size([3 * PIECE // 8])], [torch.float32])
"""Of the objects above."""


class User:
    """Calls an adapter as LMCache does, one task at a time."""

    def __init__(self, path=None, **more):
        self.adapter = RipienoL2(params(path, **more) if path else more)

    def wait(self, descriptor):
        assert select.select([descriptor], [], [], 60)[0], "no event"
        os.eventfd_read(descriptor)

    def store(self, keys, objects):
        task = self.adapter.submit_store_task(keys, objects)
        self.wait(self.adapter.get_store_event_fd())
        return self.adapter.pop_completed_store_tasks()[task]

    def lookup(self, keys):
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: LAYOUT})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None, "only once"
        return [found.test(at) for at in range(len(keys))]

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        self.wait(self.adapter.get_load_event_fd())
        loaded = self.adapter.query_load_result(task)
        return [loaded.test(at) for at in range(len(keys))]

    def check(self, numbers, salt=""):
        """Returns which objects are found. Those have the right bytes."""
        keys, targets = [key(n, salt) for n in numbers], [empty() for _ in numbers]
        found = self.lookup(keys)
        loaded = self.load(keys, targets)
        self.adapter.submit_unlock([each for each, there in zip(keys, found, strict=True) if there])
        for number, target, arrived in zip(numbers, targets, loaded, strict=True):
            assert not arrived or torch.equal(target.tensor, data(number).tensor), "bytes"
        assert all(arrived for arrived, there in zip(loaded, found, strict=True) if there)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.adapter.close()


@pytest.mark.parametrize("rate", [None, 0.0, 0.4])
def test_their_own_check_passes(tmp_path, rate):
    """Also below their fault injector, which drops some loads: the others are right."""
    named = {"module_path": "ripieno.lmcache", "class_name": "RipienoL2"}
    adapter = {"type": "plugin", "adapter_params": params(tmp_path / "kv"), **named}
    if rate is not None:
        adapter = {"type": "fault_inject", "rate": rate, "seed": 1, "inner": adapter}
    check = ["-m", f"{CHECK}.basic_check", "--mode", "test_l2_adapter", "--num-keys", "16"]
    ended = subprocess.run(
        [sys.executable, *check, "--l2-adapter", json.dumps(adapter)],
        capture_output=True,
        text=True,
        check=True,
    )
    said = ended.stdout + ended.stderr
    assert "16/16 correctly absent" in said
    assert "Batch store OK" in said
    assert "16/16 found" in said
    assert "mismatch" not in said
    loaded, right = (
        int(said.split(f"Validation ({what}): ")[1].split("/")[0]) for what in ("loaded", "content")
    )
    assert loaded == right
    assert (loaded < 16) == (rate == 0.4)


def test_a_restart_finds_everything(tmp_path):
    numbers = list(range(38))
    with User(tmp_path) as user:
        stored = user.store([key(n) for n in numbers], [data(n) for n in numbers])
        assert stored.bytes_transferred() == 38 * 3 * PIECE // 2
        assert user.check(numbers) == [True] * 38
        used = user.adapter.get_usage()
    with User(tmp_path) as user:
        assert user.adapter.get_usage() == used
        assert user.check(numbers + [99]) == [True] * 38 + [False]
        assert user.store([key(0)], [data(0)]).bytes_transferred() == 0, "it is there"


LIFE = """
import sys
sys.path.insert(0, sys.argv[2])
import test_lmcache as tests
user = tests.User(sys.argv[1])
for number in range(10_000):
    user.store([tests.key(number)], [tests.data(number)])
    print(number, flush=True)
"""


def test_objects_of_a_killed_process_are_whole_or_absent(tmp_path):
    here = pathlib.Path(__file__).parent
    for round in range(3):
        command = [sys.executable, "-c", LIFE, str(tmp_path / "kv"), str(here)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as life:
            last = -1
            for line in life.stdout:
                last = int(line)
                if last >= 4 * (round + 1):
                    life.send_signal(signal.SIGKILL)
        assert life.returncode == -signal.SIGKILL
        with User(tmp_path / "kv") as user:
            found = user.check(range(last + 3))
            assert found[: last + 1] == [True] * (last + 1)


def test_vllm_scans_for_its_kernels_after_lmcache_was_imported():
    assert "llvmlite.binding.ffi" in sys.modules, "no more: then nothing is to be hidden"
    register()


def known_file(tmp_path):
    (path,) = tmp_path.glob("*/objects.json")
    return path


def test_no_file_has_a_salt(tmp_path):
    with User(tmp_path) as user:
        user.store([key(1, "the-salt"), key(2)], [data(1), data(2)])
        path = known_file(tmp_path)
        texts = [each.read_bytes() for each in path.parent.iterdir()]
        assert not any(b"the-salt" in text for text in texts)
        assert all(each.stat().st_mode & 0o77 == 0 for each in path.parent.iterdir())
    with User(tmp_path) as user:
        used = user.adapter.get_usage()
        assert (used.total_bytes_used, used.bytes_by_cache_salt) == (4 * PIECE, {"": 2 * PIECE})
        assert user.check([1, 2], "the-salt") == [True, False], "it is known by its digest"
        user.store([key(3, "the-salt")], [data(3)])
        assert user.adapter.get_usage().bytes_by_cache_salt["the-salt"] == 4 * PIECE


DAMAGED = [
    "",
    "[[9830",
    "[]",
    "null",
    "{}",
    "[[1],[2]]",
    '[["x"],[""]]',
    "[[-1],[]]",
    "[[true],[]]",
]
DAMAGED += ["[[1" + "0" * 400 + "],[]]", '[[1],["ab"]]', "[" * 100_000]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_beside_the_store_is_named_and_written_anew(tmp_path, text, monkeypatch):
    told = []
    monkeypatch.setattr("ripieno.lmcache.logger.warning", lambda *args: told.append(args))
    with User(tmp_path) as user:
        user.store([key(1, "a"), key(2)], [data(1), data(2)])
    path = known_file(tmp_path)
    path.write_text(text)
    with User(tmp_path) as user:
        assert user.adapter.get_usage().total_bytes_used == 4 * PIECE
        assert user.check([1, 2], "a") == [True, False]
    with User(tmp_path) as user:
        assert user.adapter.get_usage().total_bytes_used == 4 * PIECE
        assert user.check([2]) == [True], "nothing has asked for this salt since the damage"
    assert len(told) == 1 and str(path) in told[0], "the second time it is whole again"


def test_what_does_not_start_leaves_the_directory(tmp_path, monkeypatch):
    with User(tmp_path) as user:
        user.store([key(1)], [data(1)])
    path = known_file(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        User(tmp_path)
    path.rmdir()
    User(tmp_path).adapter.close()


def test_users_do_not_see_each_other(tmp_path):
    with User(tmp_path) as user:
        user.store([key(1, "alice"), key(2, "bob"), key(3, "bob")], [data(1), data(2), data(3)])
        assert user.check([1, 2, 3], "alice") == [True, False, False]
        assert user.check([1, 2, 3], "bob") == [False, True, True]
        assert user.check([1, 2, 3]) == [False] * 3
        assert user.adapter.get_usage().bytes_by_cache_salt == {
            "alice": 2 * PIECE,
            "bob": 4 * PIECE,
        }
        user.adapter.delete([key(2, "bob")])
        assert user.check([2, 3], "bob") == [False, True]
        assert user.adapter.get_usage().bytes_by_cache_salt["bob"] == 2 * PIECE
    with User(tmp_path) as user:
        assert user.adapter.get_usage().total_bytes_used == 4 * PIECE
    with User(tmp_path, weights_id="others") as user:
        assert user.check([1], "alice") == [False]


def test_a_size_that_differs_is_a_miss(tmp_path):
    with User(tmp_path) as user:
        user.store([key(1)], [data(1)])
        assert user.load([key(1)], [empty(PIECE)]) == [False]
        user.store([key(1)], [data(7, PIECE)])
        target = empty(PIECE)
        assert user.load([key(1)], [target]) == [True]
        assert torch.equal(target.tensor, data(7, PIECE).tensor)
        assert user.check([1]) == [True]


def test_locked_objects_are_not_evicted(tmp_path):
    """The store has room for about 100 objects."""
    with User(tmp_path) as user:
        locked = list(range(20))
        user.store([key(n) for n in locked], [data(n) for n in locked])
        assert all(user.lookup([key(n) for n in locked]))
        for first in range(100, 900, 20):
            some = range(first, first + 20)
            user.store([key(n) for n in some], [data(n) for n in some])
        assert user.check(locked) == [True] * 20
        assert user.adapter.report_status()["locked"] == 20
        assert user.adapter.get_usage().total_bytes_used <= 16 << 20
        user.adapter.submit_unlock([key(n) for n in locked])
        assert user.adapter.report_status()["locked"] == 0
        user.adapter.submit_unlock([key(n) for n in locked])


def test_what_lmcache_has_in_memory_counts_as_used(tmp_path):
    """LMCache loads it only once, however often it is used, and tells of that from 0.5.7 on."""
    with User(tmp_path) as user:
        used, unused = ([key(n) for n in range(first, first + 20)] for first in (0, 20))
        for first in range(0, 900, 20):
            some = range(first, first + 20)
            user.store([key(n) for n in some], [data(n) for n in some])
            user.adapter.submit_touch([*used, key(99_999)])
        assert user.lookup(used) == [True] * 20
        assert user.lookup(unused) == [False] * 20
        assert user.adapter.report_status()["locked"] == 20


def test_lmcache_is_told_where_the_bytes_are(tmp_path, monkeypatch):
    """LMCache 0.5.7 has these names, asks, and makes no adapter that does not answer."""
    monkeypatch.setattr(api, "MemorySegment", SimpleNamespace(STORAGE="storage"), raising=False)
    monkeypatch.setattr(api, "MemoryResidency", SimpleNamespace(LOCAL="local"), raising=False)
    monkeypatch.setattr(api, "MemoryTags", lambda *tags: tags, raising=False)
    with User(tmp_path) as user:
        assert user.adapter.get_memory_tags() == ("storage", "local")


def test_what_remains_after_eviction_has_the_right_bytes(tmp_path):
    chance = random.Random(3)
    with User(tmp_path) as user:
        found = 0
        for _ in range(60):
            some = chance.sample(range(200), 12)
            user.store([key(n) for n in some], [data(n) for n in some])
            found += sum(user.check(chance.sample(range(200), 12)))
        assert found > 50


def test_processes_share_the_store_of_a_server(tmp_path):
    """A server of vLLM's blocks, say: a piece is such a block."""
    from serving import Server
    from waiting import until

    shape = ripieno.Shape(layers=4, segments=1, object_bytes=PIECE // 4, block_tokens=32)
    numbers = list(range(40))
    with Server(tmp_path, shape) as server:
        with User(server=server.socket) as one, User(server=server.socket) as other:
            stored = one.store([key(n, "alice") for n in numbers], [data(n) for n in numbers])
            assert stored.bytes_transferred() == 40 * 3 * PIECE // 2
            assert other.check(numbers + [99], "alice") == [True] * 40 + [False]
            assert other.check(numbers, "bob") == [False] * 40
            usage = other.adapter.get_usage()
            assert usage.bytes_by_cache_salt == {"alice": 40 * 2 * PIECE}
            assert usage.total_capacity_bytes <= 64 << 20
            labels = {each["label"]: each["files"] for each in server.status()["namespaces"]}
            begin = hashlib.sha256(b"alice").hexdigest()[:8]
            assert labels[f"lmcache salt {begin}"] == 40 * 2 and "alice" not in str(labels)
            other.adapter.delete([key(7, "alice")])
            assert one.check([6, 7, 8], "alice") == [True, False, True]
            assert all(one.lookup([key(n, "alice") for n in range(6)]))
            assert server.status()["files_referenced"] == 12
            one.adapter.submit_unlock([key(n, "alice") for n in range(6)])
            server.kill()
            assert one.check(numbers, "alice") == [False] * 40
            assert not one.store([key(50)], [data(50)]).bytes_transferred()
            server.start()
            until(lambda: one.check([8, 9], "alice") == [True, True], "it does not connect")
            assert one.adapter.report_status()["is_healthy"]
        assert server.settled()["refused_calls"] == 0


def test_a_server_has_namespaces_for_some_salts(tmp_path):
    from serving import Server

    shape = ripieno.Shape(layers=4, segments=1, object_bytes=PIECE // 4, block_tokens=32)
    with Server(tmp_path, shape) as server, User(server=server.socket) as user:
        salts = [f"salt {number}" for number in range(70)]
        for salt in salts:
            user.store([key(1, salt)], [data(1)])
        stored = [user.check([1], salt) == [True] for salt in salts]
        assert stored == [at < 63 for at in range(70)]
        assert set(user.adapter.get_usage().bytes_by_cache_salt) == set(salts[:63])
        user.adapter.delete([key(1, salts[69]), key(1, salts[0])])
        assert set(user.adapter.get_usage().bytes_by_cache_salt) == set(salts[1:63])


class Wrong(ripieno.lmcache.RipienoL2):
    """Gives each object the pieces of the first one."""

    def _found(self, key, size, address=0):
        found = super()._found(key, size, address)
        return replace(found, keys=[name[-4:] * 8 for name in found.keys])


def test_that_these_tests_notice(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RipienoL2", Wrong)
    with User(tmp_path) as user, pytest.raises(AssertionError, match="^bytes"):
        user.store([key(1)], [data(1)])
        user.store([key(2)], [data(2)])
        user.check([1, 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "kv"}, "capacity is missing; give path and capacity"),
        (params("kv", server="sock"), "adapter_params: capacity, path, piece was given beside server"),
        (params("kv", size=1), "size: there is no such option; there are"),
        (params("kv", buffer=PIECE), "give a larger buffer or a smaller piece"),
        (params("kv", capacity="much"), "capacity"),
    ],
)
def test_wrong_parameters_are_named(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        RipienoL2(given)
    assert os.listdir(tmp_path) == []
