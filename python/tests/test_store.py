"""A store in one process."""

import gc
import hashlib
import multiprocessing
import os
import pathlib
import re
import weakref
from importlib.metadata import version

import numpy
import pytest
from waiting import until

import ripieno
from ripieno.objects import Objects

SHAPE = ripieno.Shape(layers=3, segments=2, object_bytes=4096, block_tokens=16)
BLOCKS = 16
CAPACITY = 32 << 20


def keys(*numbers):
    return [hashlib.sha256(str(number).encode()).digest() for number in numbers]


def memory():
    return numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)


def random():
    size = (SHAPE.rows, BLOCKS, SHAPE.object_bytes)
    return numpy.frombuffer(os.urandom(numpy.prod(size)), numpy.uint8).reshape(size).copy()


def save(store, names, blocks):
    with store.store(names, blocks) as request:
        request.move_all()
        return request.commit()


def is_paced():
    tasks = pathlib.Path("/proc/self/task").iterdir()
    return any(task.joinpath("comm").read_text() == "ripieno pacer\n" for task in tasks)


def test_what_is_held_is_not_evicted(tmp_path):
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    with ripieno.Store(tmp_path / "kv", SHAPE, pool, capacity=CAPACITY) as store:
        names = keys(0, 1, 2, 3)
        assert save(store, names, [0, 1, 2, 3]) == 4
        assert store.take_dropped() == []
        with store.hold([*names[:2], *keys("unknown"), names[3]]) as held:
            assert held.blocks == 2
            assert store.evict(4) == 2
            assert store.lookup(names) == 2
        assert sorted(store.take_dropped()) == sorted(names[2:])
        held.end()
        assert store.evict(4) == 2


@pytest.mark.parametrize("pacing", [False, True])
def test_bytes_survive(tmp_path, pacing):
    kv = random()
    sent = kv.copy()
    pool = ripieno.Pool.contiguous(kv, SHAPE)
    with ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY, pacing=pacing) as store:
        assert save(store, keys(1, 2, 3), [4, 5, 6]) == 3
    kv[:] = 0
    with ripieno.Store(tmp_path / "s", SHAPE, pool, pacing=pacing) as store:
        # The thread names itself.
        until(lambda: is_paced() == pacing, "no thread paces")
        assert store.lookup(keys(1, 2, 3, 4)) == 3
        assert store.lookup(b"".join(keys(1, 2))) == 2
        with store.load(keys(1, 2, 3, 4), [9, 0, 15, 1]) as request:
            assert (request.blocks, request.found) == (3, [True, True, True, False])
            for layer in range(SHAPE.layers):
                request.start(layer)
            for layer in range(SHAPE.layers):
                request.wait(layer)
        assert (kv[:, [9, 0, 15]] == sent[:, [4, 5, 6]]).all()
        assert not kv[:, 1].any(), "nothing was stored for it"
        assert store.stats()["hit_tokens_total"] == 3 * SHAPE.block_tokens
        assert store.usage().stored == 3


def test_a_key_that_is_not_stored_hides_none_behind_it(tmp_path):
    kv = random()
    sent = kv.copy()
    with ripieno.Store(
        tmp_path / "s", SHAPE, ripieno.Pool.contiguous(kv, SHAPE), capacity=CAPACITY
    ) as store:
        save(store, keys(1, 3), [4, 6])
        assert store.are_stored(keys(1, 2, 3, 4)) == [True, False, True, False]
        assert store.lookup(keys(1, 2, 3, 4)) == 1
        with store.load(keys(1, 2, 3, 4), [9, 0, 15, 1]) as request:
            assert (request.blocks, request.found) == (2, [True, False, True, False])
            request.move_all()
        assert (kv[:, [9, 15]] == sent[:, [4, 6]]).all()
        assert (kv[:, [0, 1]] == sent[:, [0, 1]]).all(), "nothing was stored for them"


def test_sizes_are_bytes_or_text(tmp_path):
    for size, bytes in [(4096, 4096), ("4096", 4096), ("32 MiB", 32 << 20), ("1.5GiB", 3 << 29)]:
        assert ripieno.parse_size(size) == bytes
    with pytest.raises(ripieno.InvalidError, match="^room: None was given; expected a number"):
        ripieno.parse_size(None, "room")
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    block = SHAPE.rows * SHAPE.object_bytes
    for wrong in ({"capacity": "32 parsecs"}, {"capacity": CAPACITY, "dram": "32 parsecs"}):
        (name,) = (name for name, value in wrong.items() if value == "32 parsecs")
        with pytest.raises(ripieno.InvalidError, match=f"^{name}: .32 parsecs. was given; exp"):
            ripieno.Store(tmp_path / "s", SHAPE, pool, **wrong)
    with pytest.raises(ripieno.InvalidError, match="^capacity: .3.5. was given; expected a number"):
        ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=3.5)
    with pytest.raises(ripieno.InvalidError, match="^dram: .* were asked for; "):
        ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY, dram="1024TiB")
    assert not (tmp_path / "s").exists()
    sizes = {"capacity": "32MiB", "dram": f"{2 * block // 1024}KiB"}
    with ripieno.Store(tmp_path / "s", SHAPE, pool, **sizes) as store:
        assert (tmp_path / "s/device-0.img").stat().st_size == CAPACITY
        save(store, keys(1, 2, 3), [4, 5, 6])
        assert store.stats()["dram_used_blocks"] == 2
    with pytest.raises(ripieno.InvalidError, match='^capacity: "many" was given'):
        ripieno.prepare(tmp_path / "r", SHAPE, capacity="many")
    assert ripieno.prepare(tmp_path / "r", SHAPE, capacity="32MiB")


def test_what_is_in_dram_is_not_read(tmp_path):
    kv = random()
    sent = kv.copy()
    pool = ripieno.Pool.contiguous(kv, SHAPE)
    block = SHAPE.rows * SHAPE.object_bytes
    with ripieno.Store(
        tmp_path / "s", SHAPE, pool, capacity=CAPACITY, dram=2 * block
    ) as store:
        save(store, keys(1, 2, 3), [4, 5, 6])
        with store.load(keys(1, 2, 3), [9, 0, 15]) as request:
            request.move_all()
        assert (kv[:, [9, 0, 15]] == sent[:, [4, 5, 6]]).all()
        stats = store.stats()
        blocks = [f"dram_{name}" for name in ("hit_blocks_total", "miss_blocks_total", "used_blocks")]
        assert [stats[name] for name in blocks] == [2, 1, 2]
        assert (stats["dram_loaded_bytes_total"], stats["read_bytes_total"]) == (2 * block, block)
        save(store, keys(4, 5), [1, 2])
        assert store.prefetch(keys(6, 1)) == 0
        assert store.prefetch(keys(1, 2, 6), within=60.0) == 2
        until(lambda: store.stats()["dram_prefetched_bytes_total"] >= 2 * block, "they are not read")
        with store.load(keys(1, 2), [9, 0]) as request:
            request.move_all()
        assert (kv[:, [9, 0]] == sent[:, [4, 5]]).all()
        assert store.stats()["read_bytes_total"] == block, "as before"
        for wrong in (-1.0, float("inf"), float("nan"), 1e12):
            with pytest.raises(ripieno.InvalidError, match="within is"):
                store.prefetch(keys(1), wrong)


def test_only_what_is_prefetched_is_in_dram(tmp_path):
    pool = ripieno.Pool.contiguous(random(), SHAPE)
    block = SHAPE.rows * SHAPE.object_bytes
    given = {"capacity": CAPACITY, "dram": 4 * block}
    with pytest.raises(ripieno.InvalidError, match="^dram_mode: .back-write. was given; give write-through or read-ahead"):
        ripieno.Store(tmp_path / "s", SHAPE, pool, dram_mode="back-write", **given)
    with ripieno.Store(tmp_path / "s", SHAPE, pool, dram_mode="read-ahead", **given) as store:
        save(store, keys(1, 2, 3), [4, 5, 6])
        assert store.stats()["dram_used_blocks"] == 0
        assert store.prefetch(keys(1, 2), within=60.0) == 2
        until(lambda: store.stats()["dram_prefetched_bytes_total"] >= 2 * block, "they are not read")
        with store.load(keys(1, 2, 3), [9, 0, 15]) as request:
            request.move_all()
        stats = store.stats()
        blocks = [f"dram_{name}" for name in ("hit_blocks_total", "miss_blocks_total", "used_blocks")]
        assert [stats[name] for name in blocks] == [2, 1, 2]


def test_memory_of_any_alignment(tmp_path):
    raw = bytearray(SHAPE.rows * BLOCKS * SHAPE.object_bytes + 1)
    kv = memoryview(raw)[1:]
    kv[:] = os.urandom(len(kv))
    sent = bytes(kv)
    with ripieno.Store(
        tmp_path / "s", SHAPE, ripieno.Pool.contiguous(kv, SHAPE), capacity=CAPACITY
    ) as store:
        save(store, keys(1), [7])
        kv[:] = bytes(len(kv))
        with store.load(keys(1), [8]) as request:
            request.move_all()
    size = SHAPE.object_bytes
    for row in range(SHAPE.rows):
        at = row * BLOCKS * size
        assert kv[at + 8 * size : at + 9 * size] == sent[at + 7 * size : at + 8 * size]


def test_namespaces_pins_and_removal(tmp_path):
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    with ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY) as store:
        other = store.within(ripieno.Namespace(tenant_salt=b"other"))
        save(store, keys(1, 2), [0, 1])
        assert other.lookup(keys(1)) == 0
        assert store.pin(keys(1), 60) == ("accepted", None, 1)
        assert store.evict(8) == 1
        assert store.lookup(keys(1, 2)) == 1
        assert (store.unpin(1), store.unpin(1)) == (True, False)
        assert store.remove(keys(1, 2)) == 1
        save(store, keys(1), [0])
        assert store.bump_epoch() == 1
        assert store.lookup(keys(1)) == 0
        assert store.poll_events() == []
        other.close()
        with pytest.raises(ripieno.ClosedError):
            store.stats()


def test_what_was_not_committed_is_not_found(tmp_path):
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    with ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY) as store:
        with store.store(keys(1), [0]) as request:
            request.move_all()
        assert store.lookup(keys(1)) == 0
        with store.store(keys(1), [0]) as request:
            request.start(0)
            with pytest.raises(ripieno.Error, match="layer 1 was not stored"):
                request.wait(0)
                request.commit()
        assert store.lookup(keys(1)) == 0


def hold(path, ready, done):
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    with ripieno.Store(path, SHAPE, pool, capacity=CAPACITY):
        ready.set()
        done.wait()


def test_errors_say_what_to_do(tmp_path):
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    with pytest.raises(ripieno.NotFoundError, match="no store here; create one"):
        ripieno.Store(tmp_path / "none", SHAPE, pool)
    with pytest.raises(ripieno.NoSpaceError, match="are free"):
        ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=1 << 50)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ripieno.OccupiedError, match="thesis.tex"):
        ripieno.Store(tmp_path / "full", SHAPE, pool, capacity=CAPACITY)
    with ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY) as store:
        with pytest.raises(ripieno.InvalidError, match="a key of 3 bytes"):
            store.lookup([b"abc"])
        with pytest.raises(ValueError, match="2 blocks were given for 1 keys; give one for each"):
            store.load(keys(1), [1, 2])
        with pytest.raises(ripieno.InvalidError, match="block 99 was given"):
            store.store(keys(1), [99])
        with store.store(keys(1), [1]) as request:
            with pytest.raises(ripieno.InvalidError, match="layer 3 was given; there are 3"):
                request.start(3)
            with pytest.raises(ripieno.InvalidError, match="not in flight"):
                request.wait(0)
    other = ripieno.Shape(layers=3, segments=2, object_bytes=8192, block_tokens=16)
    shapes = r"another shape \(3 layers x 2 segments, objects of 4096 .* given: 3 layers x 2 .* 8192"
    with pytest.raises(ripieno.DamagedError, match=shapes):
        ripieno.Store(tmp_path / "s", other, ripieno.Pool.contiguous(memory().reshape(-1), other))
    with pytest.raises(ripieno.InvalidError, match=r"^pool: with 3 layers x .*, the last of its 16 "):
        ripieno.Store(tmp_path / "s", other, pool)
    for array in (memory().swapaxes(0, 1).copy(), memory()[:3], memory()[:, :, :512].copy()):
        with pytest.raises(ripieno.InvalidError, match=r"^an array of shape .*the 6 rows .* 4096 by"):
            ripieno.Pool.contiguous(array, SHAPE)
    for wide in (memory().view(numpy.uint64), memory().reshape(3, 2, BLOCKS, 16, 256)):
        assert ripieno.Pool.contiguous(wide, SHAPE).blocks == BLOCKS
    with pytest.raises(ripieno.InvalidError, match="^shape: layers is 0; give 1 or more"):
        ripieno.Shape(layers=0, segments=2, object_bytes=8192, block_tokens=16)
    with pytest.raises(ripieno.InvalidError, match="give a larger one"):
        ripieno.Pool.contiguous(bytearray(9), SHAPE)
    with pytest.raises(ripieno.InvalidError, match="read-only"):
        ripieno.Pool.contiguous(bytes(1 << 20), SHAPE)


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=hold, args=(tmp_path / "s", ready, done))
    child.start()
    assert ready.wait(60)
    pool = ripieno.Pool.contiguous(memory(), SHAPE)
    with pytest.raises(ripieno.LockedError, match=f"process {child.pid}"):
        ripieno.Store(tmp_path / "s", SHAPE, pool)
    done.set()
    child.join()
    assert child.exitcode == 0


def test_damaged_data_is_an_error_and_then_a_miss(tmp_path):
    kv = random()
    pool = ripieno.Pool.contiguous(kv, SHAPE)
    with ripieno.Store(tmp_path / "s", SHAPE, pool, capacity=CAPACITY) as store:
        save(store, keys(1, 2), [0, 1])
    medium = tmp_path / "s" / "device-0.img"
    image = bytearray(medium.read_bytes())
    at = image.find(kv[3, 0].tobytes())
    assert at > 0
    image[at + 100] ^= 1
    medium.write_bytes(image)
    with ripieno.Store(tmp_path / "s", SHAPE, pool) as store:
        with store.load(keys(1, 2), [2, 3]) as request:
            with pytest.raises(ripieno.TransferError, match="block 0 of the request"):
                request.move_all()
        assert store.lookup(keys(1, 2)) == 0
        assert store.lookup(keys(2)) == 1


def test_memory_is_kept_until_it_was_closed(tmp_path):
    class Memory(numpy.ndarray):
        pass

    kv = memory().view(Memory)
    alive = weakref.ref(kv)
    store = ripieno.Store(
        tmp_path / "s", SHAPE, ripieno.Pool.contiguous(kv, SHAPE), capacity=CAPACITY
    )
    del kv
    gc.collect()
    assert alive() is not None
    store.close()
    gc.collect()
    assert alive() is None


def run_the_page(page, path, monkeypatch, examples):
    monkeypatch.chdir(path)
    text = pathlib.Path(__file__).parents[1].joinpath(page).read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(codes) == 2
    names = {}
    for code in codes[:examples]:
        exec(code, names)


def test_the_readme_works(tmp_path, monkeypatch):
    run_the_page("README.md", tmp_path, monkeypatch, 1)


def test_the_package_says_its_version():
    assert ripieno.__version__ == version("ripieno")


def test_an_object_larger_than_the_store_is_not_stored(tmp_path):
    with Objects.open(path=str(tmp_path), capacity="4MiB", piece="4KiB", buffer="1MiB") as cache:
        small = cache.named("small", bytearray(b"small"))
        large = cache.named("large", bytearray(8 << 20))
        assert cache.store([small]) == [0]
        assert cache.store([large]) == []
        assert cache.are_stored([small, large]) == [True, False]
        # Together they do not fit: what is said to be stored is.
        parts = [cache.named(f"part {at}", bytearray(256 << 10)) for at in range(8)]
        stored = cache.store(parts)
        found = cache.are_stored(parts)
        assert stored == [at for at, is_stored in enumerate(found) if is_stored]


def test_the_page_about_objects_works(tmp_path, monkeypatch):
    run_the_page("../docs/start/objects.md", tmp_path, monkeypatch, 2)


def test_the_readme_works_with_torch(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    run_the_page("README.md", tmp_path, monkeypatch, 2)
