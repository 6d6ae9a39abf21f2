"""The storage backend for SGLang's HiCache: its interface, made by its factory, below its failure
injector. SGLang's engine does not run here."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import types

import pytest

if (found := importlib.util.find_spec("sglang")) is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
# SGLang's own module imports kernels for GPUs. Those below it that are used here need only torch.
package = types.ModuleType("sglang")
package.__path__ = list(found.submodule_search_locations)
sys.modules.setdefault("sglang", package)

import ripieno.objects  # noqa: E402
import ripieno.sglang  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

PIECE = 4096
TOKENS = 4
"""Of a page."""


class Pool:
    """Pages of host memory in SGLang's layouts, with the methods of its HostKVCache."""

    dtype = torch.bfloat16

    def __init__(self, layout="layer_first", layers=3, heads=2, head=32, pages=64, tokens=TOKENS):
        self.layout, self.page_size = layout, tokens
        self.shape = (2, layers, tokens, heads, head)
        self.pages = pages
        size = (2, layers, pages * tokens, heads, head)
        if layout == "page_first":
            size = (2, pages * tokens, layers, heads, head)
        self.memory = torch.zeros(size, dtype=self.dtype)

    def page(self, index):
        if self.layout == "page_first":
            return self.memory[:, index : index + self.page_size]
        return self.memory[:, :, index : index + self.page_size]

    def get_data_page(self, index, flat=True):
        return self.page(index).flatten() if flat else self.page(index)

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.shape, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index, data):
        page = self.page(index)
        page.copy_(data.reshape(page.shape))

    def fill(self, index, number):
        """Gives a page bytes of its own."""
        page = self.page(index)
        values = torch.rand(page.shape, generator=torch.Generator().manual_seed(number))
        page.copy_(values)

    def holds(self, index, number):
        expected = Pool(self.layout, *self.shape[1:2], *self.shape[3:], 1, self.page_size)
        expected.fill(0, number)
        return torch.equal(self.page(index), expected.page(0))


class Server:
    """A backend with two pools, called as SGLang calls it: KV, and states in pages of a token."""

    def __init__(self, path, pages=64, layout="layer_first", config=None, **more):
        named = {"backend_name": "r", "module_path": "ripieno.sglang"}
        own = {"path": str(path), "capacity": "8MiB", "piece": PIECE} if path else {}
        extra = named | {"class_name": "RipienoHiCache", "buffer": "256KiB"} | own | more
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        ranks |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False}
        kinds = {"enable_storage_metrics": False, "is_page_first_layout": layout == "page_first"}
        given = ranks | kinds | {"model_name": "m", "extra_config": extra} | (config or {})
        self.config = HiCacheStorageConfig(**given)
        self.kv = Pool(layout, pages=pages)
        self.states = Pool(layout, heads=5, pages=pages, tokens=1)
        make = StorageBackendFactory.create_backend
        self.backend = self.prepared(make("dynamic", self.config, self.kv))

    def prepared(self, backend):
        backend.register_mem_pool_host(self.kv)
        backend.register_mem_host_pool_v2(self.kv, PoolName.KV)
        backend.register_mem_host_pool_v2(self.states, PoolName.MAMBA)
        backend.on_host_pools_registered()
        return backend

    def transfer(self, name, numbers, keys=None):
        """Returns SGLang's description of pages 0, 1, ... of a pool, with keys of these numbers."""
        pool = self.states if name == PoolName.MAMBA else self.kv
        indices = torch.arange(len(numbers) * pool.page_size)
        return PoolTransfer(name, indices, keys=keys or [f"{each:064x}" for each in numbers])

    def store(self, numbers, name=PoolName.KV):
        pool = self.states if name == PoolName.MAMBA else self.kv
        for at, number in enumerate(numbers):
            pool.fill(at * pool.page_size, number)
        return self.backend.batch_set_v2([self.transfer(name, numbers)])[name]

    def load(self, numbers, name=PoolName.KV):
        """Returns which pages arrive. Those have the right bytes, and others are not changed."""
        pool = self.states if name == PoolName.MAMBA else self.kv
        pool.memory.fill_(-1)
        arrived = self.backend.batch_get_v2([self.transfer(name, numbers)])[name]
        for at, (number, is_there) in enumerate(zip(numbers, arrived, strict=True)):
            index = at * pool.page_size
            page = pool.page(index)
            assert pool.holds(index, number) if is_there else (page == -1).all(), "bytes"
        return arrived

    def found(self, numbers, *transfers):
        return self.backend.batch_exists_v2([f"{each:064x}" for each in numbers], list(transfers))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.backend.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_restart_finds_all_pages_of_all_pools(layout, tmp_path):
    numbers = list(range(40))
    with Server(tmp_path, layout=layout) as server:
        assert server.found(numbers).kv_hit_pages == 0
        assert server.store(numbers) == [True] * 40
        assert server.store(numbers[30:], PoolName.MAMBA) == [True] * 10
    with Server(tmp_path, layout=layout) as server:
        assert server.backend.batch_exists([f"{each:064x}" for each in [*numbers, 99]]) == 40
        assert server.load([*numbers, 99]) == [True] * 40 + [False]
        assert server.load(numbers, PoolName.MAMBA) == [False] * 30 + [True] * 10
        assert server.store(numbers) == [True] * 40
    with Server(tmp_path, layout="page_head") as server:
        assert server.found(numbers).kv_hit_pages == 0, "another order of the bytes"
    with Server(tmp_path, layout=layout, weights_id="others") as server:
        assert server.found(numbers).kv_hit_pages == 0


def test_all_forms_of_the_interface_move_the_same_pages(tmp_path):
    """The generic one, the one with interface_v1, and the one for several pools."""
    with Server(tmp_path) as server:
        backend, keys = server.backend, [f"{each:064x}" for each in range(3)]
        for at in range(3):
            server.kv.fill(at * TOKENS, at)
        pages = [server.kv.get_data_page(at * TOKENS) for at in range(3)]
        assert backend.set(keys[0], pages[0]) is True
        assert backend.batch_set(keys[:2], pages[:2]) is True
        assert backend.batch_set_v1(keys, torch.arange(3 * TOKENS)) == [True] * 3
        assert server.load(range(3)) == [True] * 3
        blank = [server.kv.get_dummy_flat_data_page() for _ in range(4)]
        got = backend.batch_get([*keys, "f" * 64], blank)
        assert all(torch.equal(*pair) for pair in zip(got[:3], pages, strict=True))
        assert got[3] is None
        assert torch.equal(backend.get(keys[2], blank[0]), pages[2])
        server.kv.memory.zero_()
        assert backend.batch_get_v1(keys, torch.arange(3 * TOKENS)) == [True] * 3
        assert all(server.kv.holds(at * TOKENS, at) for at in range(3))
        assert (backend.exists(keys[0]), backend.exists("f" * 64)) == (True, False)
        backend.clear()
        assert (backend.batch_exists(keys), server.load(range(3))) == (0, [False] * 3)


def test_servers_share_the_store_of_another_process(tmp_path):
    import serving

    shape = ripieno.Shape(layers=1, segments=1, object_bytes=PIECE, block_tokens=TOKENS)
    numbers = list(range(40))
    with serving.Server(tmp_path, shape) as owner:
        at = owner.socket
        with Server(None, server=at) as one, Server(None, server=at) as other:
            assert one.store(numbers) == [True] * 40
            assert one.store(numbers[30:], PoolName.MAMBA) == [True] * 10
            assert other.load([*numbers, 99]) == [True] * 40 + [False]
            assert other.load(numbers, PoolName.MAMBA) == [False] * 30 + [True] * 10
            assert other.store(numbers) == [True] * 40
            # It would take the pages of others, too.
            one.backend.clear()
            assert one.found(numbers).kv_hit_pages == 40
            owner.kill()
            assert one.load(numbers) == [False] * 40 and one.store([50]) == [False]
            assert one.found(numbers).kv_hit_pages == 0


class Keeps:
    """Takes the place of what limits the files of SGLang's own backend, whose module needs more of
    SGLang than torch."""

    def __init__(self, *args, **options):
        pass

    def reserve(self, *args, **options):
        return True

    def __getattr__(self, name):
        return lambda *args: None


def test_hits_are_those_of_sglangs_own_backend(tmp_path, monkeypatch):
    """States need the last pages, an indexer all: random pages are missing in each pool."""
    place = "sglang.srt.mem_cache.storage.file.lru_file_evictor"
    monkeypatch.setitem(sys.modules, place, types.SimpleNamespace(LRUFileEvictor=Keeps))
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file"))
    chance = random.Random(5)
    lengths = set()
    with Server(tmp_path / "kv") as server:
        other = server.prepared(HiCacheFile(server.config))
        for first in range(0, 2000, 100):
            numbers = range(first, first + 12)
            for name in (PoolName.KV, PoolName.MAMBA):
                there = [each for each in numbers if chance.random() < 0.85]
                transfer = server.transfer(name, there)
                server.store(there, name)
                other.batch_set_v2([transfer])
            for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                for tail in (1, 2):
                    states = server.transfer(PoolName.MAMBA, range(tail))
                    states.hit_policy = policy
                    keys = [f"{each:064x}" for each in numbers]
                    found = server.backend.batch_exists_v2(keys, [states])
                    assert found == other.batch_exists_v2(keys, [states])
                    lengths.add(found.kv_hit_pages)
    assert len(lengths) > 4


LIFE = """
import sys
sys.path.insert(0, sys.argv[2])
import test_sglang as tests
server = tests.Server(sys.argv[1])
for number in range(0, 10_000, 2):
    server.store([number, number + 1])
    print(number, flush=True)
"""


def test_pages_of_a_killed_server_are_whole_or_absent(tmp_path):
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-c", LIFE, str(tmp_path / "kv"), str(here)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as life:
        last = -1
        for line in life.stdout:
            last = int(line)
            if last >= 40:
                life.send_signal(signal.SIGKILL)
    assert life.returncode == -signal.SIGKILL
    with Server(tmp_path / "kv") as server:
        numbers = list(range(last + 2))
        assert server.found(numbers).kv_hit_pages == len(numbers)
        for first in range(0, len(numbers), 32):
            some = numbers[first : first + 32]
            assert server.load(some) == [True] * len(some)
        server.load(range(last + 2, last + 6))


def test_pages_are_right_while_others_are_evicted(tmp_path):
    chance = random.Random(3)
    with Server(tmp_path) as server:
        found = missed = 0
        for _ in range(80):
            server.store(chance.sample(range(1000), 20))
            server.store(chance.sample(range(1000), 20), PoolName.MAMBA)
            for name in (PoolName.KV, PoolName.MAMBA):
                arrived = server.load(chance.sample(range(1000), 20), name)
                found, missed = found + sum(arrived), missed + 20 - sum(arrived)
        assert found > 100
        assert missed > 100


def test_their_failure_injector_loses_pages_and_changes_none(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    with Server(tmp_path) as server:
        assert isinstance(server.backend, HiCacheStorageFailureInjector)
        stored = {first: all(server.store(range(first, first + 4))) for first in range(0, 160, 4)}
        assert 0 < sum(stored.values()) < 40
        loaded = 0
        for first, was_stored in stored.items():
            arrived = server.load(range(first, first + 4))
            assert was_stored or not any(arrived)
            loaded += all(arrived)
        assert 0 < loaded < sum(stored.values())
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE")
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY")
    with Server(tmp_path) as server:
        for first, was_stored in stored.items():
            assert server.load(range(first, first + 4)) == [was_stored] * 4


class Wrong(ripieno.objects.Object):
    """Has the pieces of a page's first object."""

    @classmethod
    def named(cls, space, name, size, piece, address=0):
        return super().named(space, ["0"], size, piece, address)


def test_that_these_tests_notice(tmp_path, monkeypatch):
    monkeypatch.setattr(ripieno.sglang, "Object", Wrong)
    with Server(tmp_path) as server:
        server.store([1, 2])
        with pytest.raises(AssertionError, match="bytes"):
            server.load([1, 2])


def test_each_rank_has_a_store_and_a_namespace_of_its_own(tmp_path):
    def rank(number):
        return Server(tmp_path, config={"tp_rank": number, "tp_size": 2})

    with rank(0) as first, rank(1) as second:
        first.store([1])
        assert (first.load([1]), second.load([1])) == ([True], [False])
        second.store([1, 2])
    with rank(1) as second:
        assert second.load([1, 2]) == [True, True]
    sizes = [entry.name for entry in os.scandir(tmp_path) if entry.is_dir()]
    assert sorted(sizes) == ["sglang-piece4096-dp0", "sglang-piece4096-dp1"]


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        ({"size": 1}, {}, "size: there is no such option; there are .* engines"),
        ({"capacity": "much"}, {}, "capacity"),
        ({}, {"is_mla_model": True, "tp_size": 2}, "RipienoHiCache: .* --enable-dp-attention"),
        ({}, {"dp_rank": 1}, 'RipienoHiCache: this is process 1 of 1; give "engines"'),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(given, config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Server(tmp_path / "kv", config=config, **given)
    assert not (tmp_path / "kv").exists()


def test_a_store_that_is_lost_is_a_miss(tmp_path):
    with Server(tmp_path) as server:
        server.store([1])
        server.backend.objects.all.close()
        assert server.store([2]) == [False]
        assert server.backend.objects.dead
        assert (server.load([1]), server.found([1]).kv_hit_pages) == ([False], 0)


def test_parameters_are_those_of_the_documentation():
    text = (pathlib.Path(__file__).parents[3] / "docs/start/sglang.md").read_text()
    # `store` has the other options of a store, which docs/reference/options.md has.
    for name in {each.name for each in dataclasses.fields(ripieno.sglang.Options)} - {"store"}:
        assert f"| `{name}` |" in text
    begin = text.index("'{") + 1
    given = json.loads(text[begin : text.index("}'") + 1])
    assert ripieno.sglang.FACTORY >= given.keys() - {"path", "capacity"}
