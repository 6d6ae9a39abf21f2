"""A catalog in this process, and a plane in each of two others."""

import contextlib
import hashlib
import multiprocessing
import resource
import signal
from dataclasses import replace

import numpy
import pytest

import ripieno

SHAPE = ripieno.Shape(layers=3, segments=1, object_bytes=4096, block_tokens=16)
BLOCKS = 16
RANKS = 2
CAPACITY = 64 << 20
SPAWN = multiprocessing.get_context("spawn")


def key(number):
    return hashlib.sha256(str(number).encode()).digest()


def content(number, rank):
    """Returns the contents of a block on a rank."""
    seed = int.from_bytes(key((number, rank))[:8], "little")
    size = (SHAPE.rows, SHAPE.object_bytes)
    return numpy.random.default_rng(seed).integers(0, 256, size, numpy.uint8)


def worker(pipe, path, rank):
    kv = numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)
    try:
        plane = ripieno.Plane(path, rank, SHAPE, ripieno.Pool.contiguous(kv, SHAPE))
    except ripieno.Error as error:
        pipe.send(error)
        return
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        what, numbers, files, extra = task
        blocks = list(range(len(files)))
        if what == "store":
            for block, number in enumerate(numbers):
                kv[:, block] = content(number, rank.rank)
            job = plane.begin_store(files, blocks)
        else:
            kv[:] = 0
            job = plane.begin_load(files, blocks, extra)
        # A rank that breaks never starts its last layer.
        layers = SHAPE.layers - 1 if extra is True else SHAPE.layers
        for layer in range(layers):
            plane.start(job, layer)
        (report,) = plane.end([job])
        right = [(kv[:, at] == content(n, rank.rank)).all() for at, n in enumerate(numbers)]
        pipe.send((report.error, report.checksums, right, plane.take_lost()))
    plane.close()


def scheduler_whose_journal_fails(pipe, path):
    """Changes a catalog before and after a write of its journal failed; sends the errors."""
    catalog = ripieno.Catalog(path)
    space = catalog.namespace(ripieno.Namespace())
    keys = [key(n) for n in range(6)]

    def store(keys):
        write = catalog.begin(space, keys)
        sums = bytes(4 * SHAPE.rows * len(keys))
        assert [catalog.written(write.id, rank, sums) for rank in range(RANKS)] == [None, True]
        return write.id

    first, late = store(keys[:2]), store(keys[2:4])
    assert catalog.commit(first)
    catalog.sync()
    # Nothing can be written to any file.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    catalog.evict(1, space)
    calls = {
        "sync": catalog.sync,
        "begin": lambda: catalog.begin(space, keys[4:]),
        "commit": lambda: catalog.commit(late),
        "remove": lambda: catalog.remove(space, keys),
        "clear": lambda: catalog.clear(space),
        "evict": lambda: catalog.evict(1),
        "bump_epoch": lambda: catalog.bump_epoch(space),
        "set_quota": lambda: catalog.set_quota(space, 3),
        "namespace": lambda: catalog.namespace(ripieno.Namespace(dtype="new")),
        # These change nothing that a journal has.
        "known": lambda: catalog.namespace(ripieno.Namespace()) == space,
        "acquire": lambda: catalog.release(catalog.acquire(space, keys).id),
        "abort": lambda: catalog.abort(late),
    }
    refused = []
    for name, call in calls.items():
        try:
            call()
        except ripieno.ReadOnlyError:
            refused.append(name)
    usage = catalog.usage(space)
    pipe.send((refused, usage.stored, usage.writing, usage.epoch, usage.quota_files))


class Engine:
    """A scheduler with its workers."""

    def __init__(self, path, start=range(RANKS)):
        self.path = path
        self.catalog = ripieno.Catalog(path)
        self.namespace = self.catalog.namespace(ripieno.Namespace(dtype="bytes"))
        self.workers = [self.start(rank) for rank in start]

    def start(self, rank):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=worker, args=(theirs, self.path, self.catalog.rank(rank)))
        process.start()
        # With no other open end, the pipe is closed when the worker ends.
        theirs.close()
        if error := ours.recv():
            raise error
        return process, ours

    def store(self, numbers, breaks=None, dies=None):
        write = self.catalog.begin(self.namespace, [key(n) for n in numbers])
        own = [numbers[at] for at in write.positions]
        for rank, (process, pipe) in enumerate(self.workers):
            if rank == dies:
                process.kill()
                process.join()
            else:
                pipe.send(("store", own, write.files, rank == breaks))
        state = None
        for rank, (_, pipe) in enumerate(self.workers):
            try:
                error, checksums, _, _ = pipe.recv()
            except EOFError:
                error = "it died"
            if error is None:
                state = self.catalog.written(write.id, rank, checksums)
            else:
                state = self.catalog.failed(write.id, rank)
        if state:
            self.catalog.commit(write.id)
        self.catalog.sync()
        return state

    def load(self, numbers):
        """Returns the count found, the ranks' errors, and per block if it is right on all ranks."""
        found = self.catalog.acquire(self.namespace, [key(n) for n in numbers])
        count = len(found.files)
        for rank, (_, pipe) in enumerate(self.workers):
            checksums = self.catalog.checksums(found.files, rank)
            pipe.send(("load", numbers[:count], found.files, checksums))
        reports = [pipe.recv() for _, pipe in self.workers]
        self.catalog.release(found.id)
        for report in reports:
            self.catalog.lost(report[3])
        right = [all(report[2][at] for report in reports) for at in range(count)]
        return count, [report[0] for report in reports if report[0]], right

    def crash(self):
        """Kills the workers."""
        for process, _ in self.workers:
            process.kill()
            process.join()
        # Without close(), unsynced changes are lost.
        del self.catalog

    def close(self):
        for process, pipe in self.workers:
            pipe.send(None)
            process.join()
            assert process.exitcode == 0
        self.catalog.close()


def prepare(path):
    return ripieno.prepare(path, SHAPE, ranks=RANKS, capacity=CAPACITY)


def test_blocks_of_all_ranks_survive_the_processes(tmp_path):
    made = prepare(tmp_path)
    numbers = list(range(8))
    engine = Engine(tmp_path)
    assert [engine.catalog.rank(rank) for rank in range(RANKS)] == made
    assert engine.store(numbers)
    assert engine.load(numbers) == (8, [], [True] * 8)
    assert engine.store(numbers + [8]), "and only the new one is written"
    assert engine.catalog.stats().stored == 9
    engine.crash()
    assert prepare(tmp_path) == made, "it is there"
    engine = Engine(tmp_path)
    assert engine.catalog.lookup(engine.namespace, [key(n) for n in range(12)]) == 9
    asked = [key(n) for n in (11, 8, 9, 0)]
    assert engine.catalog.are_stored(engine.namespace, asked) == [False, True, False, True]
    assert engine.load(numbers) == (8, [], [True] * 8)
    engine.close()


def test_what_one_rank_did_not_store_nobody_finds(tmp_path):
    prepare(tmp_path)
    engine = Engine(tmp_path)
    numbers = list(range(8))
    free = engine.catalog.stats().free
    assert engine.store(numbers[:4], breaks=1) is False
    assert engine.load(numbers) == (0, [], [])
    assert engine.store(numbers[:4])
    assert engine.store(numbers[4:], dies=0) is False
    engine.crash()
    engine = Engine(tmp_path)
    assert engine.load(numbers) == (4, [], [True] * 4)
    assert engine.catalog.stats().free == free - 4, "nothing is lost"
    engine.close()


def test_a_catalog_whose_journal_failed_changes_nothing(tmp_path):
    prepare(tmp_path)
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=scheduler_whose_journal_fails, args=(theirs, tmp_path))
    process.start()
    theirs.close()
    refused, *usage = ours.recv()
    process.join()
    changes = ["sync", "begin", "commit", "remove", "clear", "evict", "bump_epoch", "set_quota"]
    assert refused == [*changes, "namespace"]
    assert usage == [1, 0, 0, None]


def test_one_rank_with_damaged_data_makes_a_miss(tmp_path):
    prepare(tmp_path)
    engine = Engine(tmp_path)
    assert engine.store([0, 1])
    engine.close()
    medium = tmp_path / "rank-1" / "device-0.img"
    image = bytearray(medium.read_bytes())
    image[image.find(content(0, 1)[2].tobytes())] ^= 1
    medium.write_bytes(image)
    engine = Engine(tmp_path)
    count, errors, right = engine.load([0, 1])
    assert (count, len(errors), right[0]) == (2, 1, False)
    assert engine.load([0, 1]) == (0, [], []), "it counts as not stored"
    assert engine.load([1]) == (1, [], [True])
    engine.close()


def test_a_part_that_is_another_one_is_refused(tmp_path):
    prepare(tmp_path / "a")
    (rank, _) = prepare(tmp_path / "b")
    engine = Engine(tmp_path / "a", start=())
    with pytest.raises(ripieno.LockedError):
        ripieno.Catalog(tmp_path / "a")
    engine.path = tmp_path / "b"
    with pytest.raises(ripieno.DamagedError, match="it belongs to store"):
        engine.start(0)
    with pytest.raises(ripieno.InvalidError, match="rank 2 was asked for; there are 2"):
        engine.catalog.rank(2)
    with pytest.raises(ripieno.InvalidError, match="holds a store for 2 ranks"):
        ripieno.prepare(tmp_path / "a", SHAPE, ranks=1, capacity=CAPACITY)
    with pytest.raises(ripieno.NotFoundError):
        ripieno.Catalog(tmp_path)
    engine.close()


def test_a_damaged_catalog_says_how_to_look_at_it(tmp_path):
    prepare(tmp_path)
    medium = tmp_path / "catalog" / "device-0.img"
    medium.write_bytes(bytes(medium.stat().st_size))
    with pytest.raises(ripieno.DamagedError, match=f"ripieno fsck --path {tmp_path}/catalog"):
        ripieno.Catalog(tmp_path)


def together(path, barrier, pipe):
    barrier.wait()
    pipe.send(prepare(path))


def test_whoever_comes_first_makes_it(tmp_path):
    barrier = SPAWN.Barrier(3)
    pipes = [SPAWN.Pipe() for _ in range(3)]
    children = [
        SPAWN.Process(target=together, args=(tmp_path / "s", barrier, theirs))
        for _, theirs in pipes
    ]
    for child in children:
        child.start()
    first, second, third = [ours.recv() for ours, _ in pipes]
    for child in children:
        child.join()
    assert first == second == third
    ripieno.Catalog(tmp_path / "s").close()


def test_what_was_not_completed_is_made_again(tmp_path):
    path = tmp_path / "s"
    with pytest.raises(ripieno.NoSpaceError):
        ripieno.prepare(path, SHAPE, ranks=RANKS, capacity=1 << 50)
    (before, _) = prepare(path)
    manifest = path / "store.json"
    manifest.write_text(manifest.read_text().replace('"ready"', '"making"'))
    with pytest.raises(ripieno.NotFoundError, match="incomplete"):
        ripieno.Catalog(path)
    (after, _) = prepare(path)
    assert after.store != before.store
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.tex").touch()
    with pytest.raises(ripieno.OccupiedError, match="thesis.tex"):
        prepare(tmp_path / "t")


def test_devices_and_executors_that_cannot_be_are_refused(tmp_path):
    def plane(pool, **options):
        return ripieno.Plane(tmp_path / "kv", ranks[0], SHAPE, pool, **options)

    for devices, error, said in [
        (["/dev/nvme0"], ripieno.InvalidError, "or vfio:0000:65:00.0"),
        (["vfio:1:00.0", "vfio:2:00.0", "vfio:3:00.0"], ripieno.InvalidError, "cannot be divided"),
        # No VFIO, or no such function.
        (["vfio:ffff:ff:1f.6", "vfio:ffff:ff:1f.7"], ripieno.DeviceError, "opening"),
    ]:
        with pytest.raises(error, match=said):
            ripieno.prepare(tmp_path / "kv", SHAPE, ranks=2, devices=devices)
    with pytest.raises(ripieno.InvalidError, match="capacity: files need a size"):
        ripieno.prepare(tmp_path / "kv", SHAPE)
    with pytest.raises(ripieno.InvalidError, match="overwrite: .all. was given; give nothing"):
        ripieno.prepare(tmp_path / "kv", SHAPE, capacity=CAPACITY, overwrite="all")
    ranks = ripieno.prepare(tmp_path / "kv", SHAPE, capacity=CAPACITY)
    pool = ripieno.Pool.contiguous(numpy.zeros((3, BLOCKS, 4096), numpy.uint8), SHAPE)
    for options, said in [
        ({"executor": "gpu"}, "executor: .gpu. was given; give file, host, inline or cuda"),
        ({"io_sms": 4}, "io_sms: no GPU runs the I/O kernel"),
        ({"route": "fast"}, "route: .fast. was given; give direct, staged or host"),
        ({"route": "direct"}, "route: direct was asked for; to this pool there is host"),
        ({"dram_mode": "read-ahead"}, "dram_mode: .* give dram"),
        ({"require": "host"}, "require: there is no such option; its name is route"),
        ({"pacin": True}, "pacin: there is no such option; pacing is the nearest"),
    ]:
        with pytest.raises(ripieno.InvalidError, match=said):
            plane(pool, **options)
    with pytest.raises(ripieno.InvalidError, match="pool.device is cuda; give cpu, or cuda:0"):
        plane(replace(pool, device="cuda"))
    with pytest.raises(ripieno.InvalidError, match="take cuda, on that GPU, or for"):
        plane(replace(pool, device="cuda:0"), executor="host")
    with plane(pool, route="host") as opened:
        assert (opened.route, opened.placement) == ("host", "host (host)")
        job = opened.begin_store([0], [0])
        with pytest.raises(ripieno.InvalidError, match="GPU"):
            opened.start(job, 0, 1)
        with pytest.raises(ripieno.InvalidError, match="not in flight"):
            opened.join(job, 0, 1)
        opened.end([job])


def test_a_plane_is_asked_for_events_until_it_is_closed(tmp_path):
    (rank,) = ripieno.prepare(tmp_path / "kv", SHAPE, capacity=CAPACITY)
    kv = numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8)
    pool = ripieno.Pool.contiguous(kv, SHAPE)
    with pytest.raises(ripieno.InvalidError, match="^dram: .* were asked for; "):
        ripieno.Plane(tmp_path / "kv", rank, SHAPE, pool, dram="1024TiB")
    with ripieno.Plane(tmp_path / "kv", rank, SHAPE, pool) as plane:
        assert plane.poll_events() == []
    with pytest.raises(ripieno.ClosedError, match="it was closed"):
        plane.poll_events()


def test_copies_of_a_rank_load_what_the_first_has_stored(tmp_path):
    """Planes in processes of their own; here they are all in this one."""
    (rank,) = ripieno.prepare(tmp_path, SHAPE, capacity=CAPACITY)
    pools = [numpy.zeros((SHAPE.rows, BLOCKS, SHAPE.object_bytes), numpy.uint8) for _ in range(3)]

    def open_copy(copy, copies=3):
        pool = ripieno.Pool.contiguous(pools[copy % 3], SHAPE)
        options = {"copies": copies, "copy": copy, "dram": "1MiB"}
        return ripieno.Plane(tmp_path, rank, SHAPE, pool, **options)

    # In any order.
    last, first, second = open_copy(2), open_copy(0), open_copy(1)

    def moved(plane, job):
        # A layer that follows one that failed is not started.
        with contextlib.suppress(ripieno.TransferError):
            for layer in range(SHAPE.layers):
                plane.start(job, layer)
        return plane.end([job])[0]

    def store(number):
        pools[0][:, 5] = content(number, 0)
        report = moved(first, first.begin_store([3], [5]))
        assert report.error is None
        return report.checksums

    def load(plane, kv, checksums):
        kv[:] = 0
        return moved(plane, plane.begin_load([3], [7], checksums))

    with pytest.raises(ripieno.LockedError):
        open_copy(0)
    with pytest.raises(ripieno.InvalidError, match="copy 3 was given; there are 3, from 0 on"):
        open_copy(3)
    with pytest.raises(ripieno.InvalidError, match="^dram: .* for each of 1048576 workers"):
        open_copy(1, copies=1 << 20)
    with pytest.raises(ripieno.ReadOnlyError):
        second.begin_store([3], [5])
    sums = store(1)
    for plane, kv in ((second, pools[1]), (last, pools[2])):
        for _ in range(2):
            assert load(plane, kv, sums).error is None
            assert (kv[:, 7] == content(1, 0)).all()
        assert plane.stats()["dram_hit_blocks_total"] == 1
    # Their host memory has what was there before.
    sums = store(2)
    assert load(second, pools[1], sums).is_mismatch
    last.forget([3])
    assert load(last, pools[2], sums).error is None
    assert (pools[2][:, 7] == content(2, 0)).all()
    first.close()
    with open_copy(0):
        assert load(last, pools[2], sums).error is None
