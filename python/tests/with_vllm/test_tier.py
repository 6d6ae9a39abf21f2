"""The tier by itself, in a shared memory region like vLLM's, without an engine."""

import dataclasses
import mmap
import os
import shutil
import threading
import types

import numpy as np
import pytest

pytest.importorskip("vllm")
from ripieno import plugin, tiering  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadPolicy,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402

# As an engine does before its first request.
kv_cache_utils.init_none_hash(sha256)

CHUNKS, CHUNK = 16, 12288
REQUEST = ReqContext("request")


def key(name, group=0):
    return make_offload_key(name.encode().ljust(32, b"."), group)


def config(name="model", dtype="bfloat16", tp=1):
    parallel = OffloadingParallelConfig(0, tp, tp, 1, 1, 1, 0, 1, None, False)
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("0", "1"), 0), OffloadingGroupConfig(32, ("2", "3"), 1)),
        worker_kv_bytes_per_block=CHUNK // tp,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name, dtype),
        cache=OffloadingCacheConfig(32, 1),
        parallel=parallel,
        kv_cache_layout="LBHNC",
    )


class Engine:
    """A tier, and the region of memory that it loads into and stores from."""

    def __init__(self, path, capacity="4MiB", chunk=CHUNK, like=None, **options):
        self.memory = mmap.mmap(-1, CHUNKS * chunk)
        self.region = np.frombuffer(self.memory, np.int8).reshape(CHUNKS, chunk)
        self.view = memoryview(self.region)
        spec = types.SimpleNamespace(config=like or config(), blocks_per_chunk=1)
        self.tier = tiering.RipienoTier(spec, self.view, "RipienoTier", path, capacity, **options)
        self.tier.on_new_request(REQUEST)
        self.jobs = 0

    def start(self, act, keys, chunks, is_promotion, request=REQUEST):
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(chunks, np.int32), is_promotion, request)
        act(job)
        return job

    def ended(self, count=1):
        """Waits for so many jobs by polling, as vLLM does."""
        results = []
        while len(results) < count:
            results += self.tier.get_finished_jobs()
        return results

    def store(self, keys, fill, request=REQUEST):
        """Stores chunks, each filled with a number."""
        self.region[: len(keys)] = np.array(fill, np.int8)[:, None]
        self.start(self.tier.submit_store, keys, range(len(keys)), False, request)
        return self.ended()[0]

    def load(self, keys):
        """Loads into the last chunks. Returns the result and each number, None if mixed."""
        chunks = list(range(CHUNKS - len(keys), CHUNKS))
        self.region[chunks] = -1
        self.start(self.tier.submit_load, keys, chunks, True)
        (result,) = self.ended()
        found = [set(self.region[chunk].tolist()) for chunk in chunks]
        return result, [numbers.pop() if len(numbers) == 1 else None for numbers in found]

    def hits(self, keys):
        return [self.tier.lookup(each, REQUEST) is LookupResult.HIT for each in keys]

    def close(self):
        self.tier.shutdown()
        # As vLLM does. It raises if the store still uses the view.
        self.view.release()
        del self.region
        self.memory.close()


@pytest.fixture
def engine(tmp_path):
    """Opens tiers; closes the previous one."""
    opened = []

    def open_tier(path="kv", **settings):
        if opened:
            opened.pop().close()
        opened.append(Engine(tmp_path / path, **settings))
        return opened[0]

    yield open_tier
    opened.pop().close()


A, B, C = key("a"), key("b"), key("c")


def test_chunks_are_found_after_a_restart_of_each_group(engine):
    tier, other = engine(), key("a", group=1)
    assert tier.hits([A, B, other]) == [False, False, False]
    result = tier.store([A, B, other], [1, 2, 3])
    assert (result.success, result.transfer_bytes) == (True, 3 * CHUNK)
    tier = engine()
    assert tier.hits([other, C, B, A]) == [True, False, True, True]
    result, found = tier.load([B, A, other])
    assert (result.success, result.transfer_bytes, found) == (True, 3 * CHUNK, [2, 1, 3])


def test_what_is_there_is_not_written_again(engine):
    tier = engine()
    tier.store([A, B], [1, 2])
    result = tier.store([A, B, C], [7, 7, 3])
    assert (result.success, result.transfer_bytes) == (True, CHUNK)
    assert tier.load([A, B, C])[1] == [1, 2, 3]


def damage(tmp_path, number):
    """Flips a bit of the chunk that is filled with a number."""
    (medium,) = tmp_path.glob("kv/*/device-0.img")
    image = medium.read_bytes()
    at = image.index(bytes([number]) * CHUNK)
    with medium.open("r+b") as file:
        file.seek(at + 5000)
        file.write(bytes([number ^ 0x10]))


def test_a_damaged_chunk_is_a_miss_and_the_others_are_loaded(engine, tmp_path):
    tier = engine()
    tier.store([A, B, C], [101, 102, 103])
    damage(tmp_path, 102)
    result, found = tier.load([A, B, C])
    assert (result.success, list(result.successful_keys)) == (False, [A, C])
    assert (found[0], found[2]) == (101, 103)
    assert tier.hits([A, B, C]) == [True, False, True]
    tier.store([B], [104])
    assert tier.load([A, B, C])[1] == [101, 104, 103]


def test_a_full_store_evicts_and_never_grows(engine, tmp_path):
    tier = engine()
    (medium,) = tmp_path.glob("kv/*/device-0.img")
    blocks = medium.stat().st_blocks
    files = int(tier.tier.store.stats()["capacity_blocks"])
    keys = [key(f"key {number}") for number in range(3 * files // 8 * 8)]
    for at in range(0, len(keys), 8):
        assert tier.store(keys[at : at + 8], [at % 100] * 8).success
    hits = tier.hits(keys)
    assert files // 2 < sum(hits) <= files
    assert tier.load(keys[-8:])[1] == [(len(keys) - 8) % 100] * 8
    assert medium.stat().st_blocks == blocks
    stats = tier.tier.get_stats().reduce()
    assert stats[tiering.USED] == sum(hits)
    assert stats[tiering.EVICTED] == len(keys) - sum(hits)


def test_a_disk_that_lost_everything_is_full_of_misses(engine, tmp_path, caplog_vllm):
    tier = engine()
    tier.store([A, B, C], [1, 2, 3])
    (medium,) = tmp_path.glob("kv/*/device-0.img")
    os.truncate(medium, 0)
    for each in ([A, B], [C], [A]):
        result, _ = tier.load(each)
        assert (result.success, list(result.successful_keys)) == (False, [])
    assert tier.hits([A, B, C]) == [False] * 3
    assert sum("not logged" in line for line in caplog_vllm.messages) == 1


def test_what_was_evicted_before_it_was_loaded_is_a_miss(engine):
    tier = engine()
    tier.store([A, B, C], [1, 2, 3])
    tier.tier.store.remove([tiering._digest(B)])
    result, found = tier.load([A, B, C])
    assert (result.success, list(result.successful_keys)) == (False, [A, C])
    assert (found[0], found[2]) == (1, 3)


@pytest.mark.parametrize(
    ("like", "options"),
    [
        (config(name="another"), {}),
        (config(dtype="float16"), {}),
        (config(tp=2), {}),
        (dataclasses.replace(config(), kv_cache_layout="BLHNC"), {}),
        (config(), {"weights_id": "v2"}),
    ],
)
def test_what_another_model_stored_is_not_found(engine, like, options):
    engine().store([A], [1])
    tier = engine(like=like, **options)
    assert tier.hits([A]) == [False]
    tier.store([A], [2])
    assert engine().load([A])[1] == [1], "and it is still there"


def test_chunks_of_another_size_have_a_store_of_their_own(engine):
    engine().store([A], [1])
    with pytest.raises(ValueError, match="others there are tier-chunk12288"):
        engine(chunk=2 * CHUNK)
    # Both share one capacity.
    tier = engine(chunk=2 * CHUNK, capacity="8MiB")
    assert tier.hits([A]) == [False]
    tier.store([A], [2])
    assert engine(capacity="8MiB").load([A])[1] == [1]


@pytest.mark.parametrize("keep", [False, True])
def test_a_reset_forgets_unless_it_is_told_to_keep(engine, tmp_path, keep):
    tier = engine(keep_on_reset=keep)
    tier.store([A], [1])
    tier.start(tier.tier.submit_store, [B], [0], False)
    tier.tier.drain_jobs()
    assert len(list(tier.tier.get_finished_jobs())) == 1, "nothing is in flight after it"
    assert tier.hits([A, B]) == [keep, keep]
    # Also after a power cut at this point.
    shutil.copytree(tmp_path / "kv", tmp_path / "cut")
    assert engine(path="cut").hits([A, B]) == [keep, keep]


def test_a_dead_store_is_a_miss_with_one_line_in_the_log(engine, caplog_vllm):
    tier = engine()
    tier.store([A, B, C], [1, 2, 3])
    tier.tier.store.close()
    result, _ = tier.load([A])
    assert (result.success, list(result.successful_keys)) == (False, [])
    assert tier.hits([A, B]) == [False, False]
    assert not tier.store([key("d")], [4]).success
    assert sum("serving goes on without" in line for line in caplog_vllm.messages) == 1


@pytest.mark.parametrize("act", ["_load", "_store"])
def test_what_goes_wrong_is_a_miss_and_never_raised(engine, monkeypatch, act):
    tier = engine()
    tier.store([A], [1])
    monkeypatch.setattr(tier.tier, act, lambda keys, chunks: 1 / 0)
    assert not (tier.load([A])[0] if act == "_load" else tier.store([B], [2])).success
    assert tier.hits([A, B]) == [act == "_store", False]
    monkeypatch.undo()
    tier.store([A, B], [3, 4])
    assert tier.hits([A, B]) == [True, True]
    assert tier.load([A, B])[1] == [1 if act == "_store" else 3, 4]


def test_hashes_that_can_be_forged_are_refused(engine, caplog_vllm, monkeypatch):
    tier = engine()
    tier.store([A], [1])
    # XXH3 with 128 bits, vLLM's "xxhash"; with a fixed seed as well.
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", bytes(16))
    tier.tier.on_new_request(REQUEST)
    assert tier.hits([A]) == [False]
    assert "use --prefix-caching-hash-algo sha256_cbor" in caplog_vllm.text


@pytest.mark.parametrize("shutdown", ["drain", "drop"])
def test_what_waits_is_stored_before_the_end_or_dropped(engine, monkeypatch, shutdown):
    tier, go = engine(shutdown=shutdown), threading.Event()
    store = tier.tier._store
    monkeypatch.setattr(tier.tier, "_store", lambda *given: go.wait() and store(*given))
    keys = [key(f"key {number}") for number in range(8)]
    for number, each in enumerate(keys):
        tier.start(tier.tier.submit_store, [each], [number], False)
    threading.Timer(0.2, go.set).start()
    started = tiering.THREADS if shutdown == "drop" else 8
    assert engine().hits(keys) == [True] * started + [False] * (8 - started)


def test_events_tell_what_is_stored_and_evicted(engine):
    tier = engine(like=dataclasses.replace(config(), enable_kv_cache_events=True))

    def told():
        events = tier.tier.take_events()
        return [(set(e.keys), e.removed, e.medium.name, e.locality.name) for e in events]

    assert told() == []
    tier.store([A, B], [1, 2])
    assert told() == [({A, B}, False, "STORAGE", "LOCAL")]
    tier.tier.store.remove([tiering._digest(A)])
    tier.tier.store.remove([tiering._digest(B)])
    tier.store([B], [2])
    # B was stored again.
    assert told() == [({B}, False, "STORAGE", "LOCAL"), ({A}, True, "STORAGE", "LOCAL")]
    silent = engine("other")
    silent.store([A], [1])
    assert list(silent.tier.take_events()) == []


def hinted(tier, kind, payload, keys=(), late=()):
    """Runs a request with a hint. It stores chunks in the reverse order of their tokens, and the
    late ones end after it."""
    hints = KvHintsEnvelope("1", "m", [KvHintAction("a", kind, "1", payload)])
    request = ReqContext("hinted", kv_hints=hints)
    for at, each in enumerate([*keys, *late]):
        request.set_offload_key_position(each, 32 * at)
    policy = tier.tier.on_new_request(request).policy
    assert policy is OffloadPolicy.REQUEST_LEVEL, "it needs all chunks of the request"
    if keys:
        tier.store(keys[::-1], [1] * len(keys), request)
    for each in late:
        tier.start(tier.tier.submit_store, [each], [0], False, request)
    tier.tier.on_request_finished(request)
    tier.ended(len(late))


def test_hints_pin_the_chunks_of_a_request(engine, monkeypatch):
    tier, told = engine(), []
    monkeypatch.setattr(tiering.logger, "info", lambda _, *given: told.append(given))
    D = key("d")
    tier.store([C], [3])
    hinted(tier, "kv.pin", {"ttl_s": 60}, [A, B], late=[D])
    assert tier.tier.store.evict(16) == 1
    assert tier.hits([A, B, C, D]) == [True, True, False, True]
    hinted(tier, "kv.pin", {"ttl_s": 60, "bytes_max": CHUNK}, [C, B])
    hinted(tier, "kv.deref", {"pin": 1})
    assert tier.tier.store.evict(16) == 3
    assert tier.hits([A, B, C, D]) == [False, False, True, False]
    hinted(tier, "kv.retain", {}, [A])
    answers = [(name, each["outcome"], each["pin"]) for name, (each,) in told]
    outcomes = [("deferred", 1), ("clipped", 2), ("accepted", None), ("rejected", None)]
    assert answers == [("hinted", *each) for each in outcomes]
    tier.tier.store.close()
    hinted(tier, "kv.pin", {"ttl_s": 60})
    assert tier.tier.dead, "and the engine goes on"


def test_a_request_may_store_nothing(engine):
    tier = engine()
    nothing = ReqContext("nothing", {"ripieno.store": False})
    assert tier.tier.on_new_request(nothing).policy is OffloadPolicy.CHUNK_LEVEL
    result = tier.store([A], [1], nothing)
    assert (result.success, result.transfer_bytes, tier.hits([A])) == (True, 0, [False])
    # Later requests find the chunk in vLLM's CPU tier, and it is theirs, too.
    assert tier.tier.on_new_request(REQUEST).policy is OffloadPolicy.REQUEST_LEVEL
    tier.store([A], [1])
    assert tier.hits([A]) == [True]


def test_metrics_are_reported_when_something_happened(engine):
    tier = engine()
    tier.store([A, B], [1, 2])
    tier.tier.store.remove([tiering._digest(B)])
    tier.load([A, B])
    stats = tier.tier.get_stats().reduce()
    assert stats[tiering.USED] == 1 <= stats[tiering.CAPACITY]
    assert (stats[tiering.LOST], stats[tiering.EVICTED], stats[tiering.HEALTHY]) == (1, 0, 1)
    assert set(stats) == set(tier.tier.build_metric_definitions({}))
    assert tier.tier.get_stats() is None
    tier.tier._fail_permanently("why")
    assert tier.tier.get_stats().reduce()[tiering.HEALTHY] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": "lots"}, "capacity: .lots. was given; expected a number and a unit"),
        ({"capacity": "1MiB"}, "needs 12288 bytes"),
        ({"size": 1}, "size"),
        ({"shutdown": "now"}, "give .drain. or .drop."),
    ],
)
def test_what_can_not_be_is_refused_in_words(tmp_path, settings, message):
    with pytest.raises(Exception, match=message):
        Engine(tmp_path / "kv", **settings)


def test_its_short_name_is_known(monkeypatch):
    # Copies for this test only, also of vLLM's connectors: another test checks their entry point.
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    monkeypatch.setattr(SecondaryTierFactory, "_registry", dict(SecondaryTierFactory._registry))
    plugin.register()
    plugin.register()
    assert SecondaryTierFactory.get_tier_class({"type": "ripieno"}) is tiering.RipienoTier


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """vLLM's loggers do not propagate to where pytest listens."""
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog
