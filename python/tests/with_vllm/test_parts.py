"""Parts of the connector, without an engine."""

import hashlib
import os
import pickle
import threading
import time
import types
from collections import Counter

import numpy
import pytest

pytest.importorskip("vllm")

import ripieno  # noqa: E402
import torch  # noqa: E402
from ripieno.vllm import place  # noqa: E402
from ripieno.vllm.adapters import Adapters, Read, digest_of, is_other  # noqa: E402
from ripieno.vllm.cost import Cost  # noqa: E402
from ripieno.vllm.groups import Groups  # noqa: E402
from ripieno.vllm.layout import check, engines_of  # noqa: E402
from ripieno.vllm.metrics import COUNTERS, GAUGES, HISTOGRAMS, Stats  # noqa: E402
from ripieno.vllm.options import Options, metrics_of  # noqa: E402
from ripieno.vllm.protocol import Job, Legacy, Reports  # noqa: E402
from ripieno.vllm.saver import SAVES_MAX, Saver  # noqa: E402
from ripieno.vllm.scheduler import (  # noqa: E402
    MAX_CONSECUTIVE_FAILURES,
    Load,
    Save,
    Scheduler,
    Watchers,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec  # noqa: E402
from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402


def stats(**counts):
    made = Stats()
    for name, value in counts.items():
        {int: made.count, float: made.observe, bool: made.show}[type(value)](name, value)
    return made


def test_stats_of_workers_and_steps_add_up():
    one = stats(loaded_bytes=5, load_seconds=0.5, healthy=True)
    other = stats(loaded_bytes=7, stored_bytes=2, load_seconds=1.5, healthy=False)
    both = one.aggregate(other)
    expected = {"loaded_bytes": 12, "stored_bytes": 2, "load_seconds": [0.5, 1.5], "healthy": False}
    assert both.data == expected
    assert one.data["load_seconds"] == [0.5], "what was observed before is not changed"
    log = {"loaded_bytes": 12, "stored_bytes": 2, "healthy": 0, "mean_load_seconds": 1.0}
    assert both.reduce() == log
    assert Stats().is_empty()


def test_the_registry_has_all_metrics_with_their_types():
    kinds = {name: kind for name, kind, _ in ripieno.METRICS}
    for names, kind in ((COUNTERS, "counter"), (GAUGES, "gauge"), (HISTOGRAMS, "histogram")):
        assert {name: kinds.get(name) for name in names} == dict.fromkeys(names, kind)


def test_each_rank_has_an_address_for_its_metrics():
    for given, third in [
        ("9400", "9402"),
        ("127.0.0.1:9400", "127.0.0.1:9402"),
        ("public:[::]:9400", "public:[::]:9402"),
        ("/run/ripieno/m", "/run/ripieno/m.2"),
        # The plane refuses it.
        ("nonsense", "nonsense"),
    ]:
        assert (metrics_of(given, 0), metrics_of(given, 2)) == (given, third)


def test_reports_of_workers_add_up():
    one = Reports(loaded={1: 1}, corrupted={1}, lost={9}, written={4: {0: b"a"}})
    one.loaded = type(Reports().loaded)(one.loaded)
    other = Reports(written={4: {1: None}}, dead="gone")
    other.loaded.update({1: 1, 2: 1})
    both = one.aggregate(other)
    assert both.loaded == {1: 2, 2: 1}
    assert (both.corrupted, both.lost, both.dead) == ({1}, {9}, "gone")
    assert both.written == {4: {0: b"a", 1: None}}


def parsed(given):
    return Options.parse(given, "kv_connector_extra_config")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 1.5}, "devices: .1.5. was given; give a number of files"),
        ({"devices": ["/dev/nvme0n1"]}, "or drives: "),
        ({"devices": []}, "or drives: "),
        ({"io_sms": 1 << 64}, "give a whole number from 1 to"),
        ({"dram_bytes": 1}, "kv_connector_extra_config: dram_bytes: .*; its name is dram$"),
        ({"schedule": True}, "schedule: there is no such option; its name is pacing$"),
        ({"save_decoed": True}, "save_decode is the nearest$"),
        ({"save_backlog": 2}, "give a number from 0 to 1$"),
        ({"shutdown": "wait"}, 'give "drain" or "drop"'),
        ({"load_async": "no"}, "give true or false"),
        ({"drain_seconds": "long"}, "give a number from 0 to"),
        # Threads cannot wait for so long, and JSON has all of these.
        ({"drain_seconds": 1e300}, "give a number from 0 to"),
        ({"drain_seconds": float("inf")}, "give a number from 0 to"),
        ({"drain_seconds": float("nan")}, "give a number from 0 to"),
        ({"layer_times": True}, "give the name of a file"),
        ({"tenants": ["alice"]}, "tenants: .* give a list of SHA-256 digests"),
        ({"tenants": "ab" * 32}, "tenants: .* give a list of SHA-256 digests"),
        ({"engines": 0}, "engines: 0 was given; give a whole number from 1 to"),
        ({"path": ""}, "path: '' was given; give the name of a directory"),
        ({"path": 7}, "path: 7 was given; give the name of a directory"),
        ({"server": "/s"}, "capacity, path was given beside server"),
    ],
)
def test_options_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        parsed({"path": "/x", "capacity": "1GiB"} | given)


def test_a_server_has_the_store():
    options = parsed({"server": "run/sock", "save_decode": False, "weights_id": "1"})
    assert options.server == os.path.join(os.getcwd(), "run/sock")
    assert (options.path, options.is_paced, options.save_decode) == ("", False, False)
    with pytest.raises(ValueError, match="dram, pacing was given beside server"):
        parsed({"server": "/s", "dram": "1GiB", "pacing": True})
    with pytest.raises(ValueError, match="server: '' was given; give the name of a socket"):
        parsed({"server": ""})
    with pytest.raises(ValueError, match="capacity, path is missing; .* socket of a server"):
        parsed({})


def test_paths_are_whole():
    def path(given):
        return parsed({"path": given, "capacity": "1GiB"}).path

    assert path("~/kv") == os.path.expanduser("~/kv")
    assert path("kv/") == os.path.join(os.getcwd(), "kv")


def test_drives_are_devices():
    drives = ["vfio:0000:65:00.0", "vfio:0000:66:00.0"]
    store = parsed({"path": "/x", "capacity": "1GiB", "devices": drives}).store
    assert store == {"devices": drives}


def test_a_plane_is_paced_with_host_memory():
    for store, is_paced in [
        ({}, False),
        ({"dram": "1GiB"}, True),
        ({"dram": 0}, False),
        ({"dram": "1GiB", "pacing": False}, False),
        ({"pacing": True}, True),
        ({"pacing": "false"}, False),
    ]:
        options = Options("/x", 1, store=store | {"metrics": 9400})
        assert options.plane(2) == store | {"pacing": is_paced, "metrics": "9402"}


@pytest.mark.parametrize(
    ("runner", "policy", "asked", "answer"),
    [
        (1, "recompute", None, False),
        (1, "recompute", True, True),
        (2, "fail", None, False),
        (2, "recompute", None, True),
        (2, "recompute", False, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_loads_are_between_steps_where_vllm_can_do_no_others(runner, policy, asked, answer):
    config, cache = configured(policy=policy, runner=runner)
    options = Options("/x", 1, load_async=asked)
    if isinstance(answer, bool):
        assert check(config, cache, options) == answer
    else:
        with pytest.raises(ValueError, match=answer):
            check(config, cache, options)


def configured(policy="fail", runner=1):
    """Returns the parts of vLLM's configuration that check() reads."""
    of = types.SimpleNamespace
    config = of(
        parallel_config=of(pipeline_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=of(prefix_caching_hash_algo="sha256"),
        model_config=of(enable_sleep_mode=False, get_total_num_hidden_layers=lambda: 61),
        kv_transfer_config=of(kv_load_failure_policy=policy),
        speculative_config=None,
        use_v2_model_runner=runner == 2,
    )
    spec = FullAttentionSpec(block_size=32, num_kv_heads=8, head_size=64, dtype=torch.float32)
    group = KVCacheGroupSpec(["model.layers.0.self_attn"], spec)
    return config, of(kv_cache_layout="LBHNC", kv_cache_groups=[group])


def test_pipelines_of_unequal_ranks_are_refused(monkeypatch):
    config, cache = configured()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match=r"have \[31, 30\] layers each, .* use --tensor-parallel"):
        check(config, cache, Options("/x", 1))
    config.model_config.get_total_num_hidden_layers = lambda: 60
    assert check(config, cache, Options("/x", 1)) is False
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,40")
    with pytest.raises(ValueError, match=r"have \[20, 40\] layers each"):
        check(config, cache, Options("/x", 1))
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION")
    config.speculative_config = object()
    with pytest.raises(ValueError, match="the last rank has the draft model's layers, too"):
        check(config, cache, Options("/x", 1))


def test_vllms_second_model_runner_can_not_step_back():
    """It cannot recompute what failed to load in a step (vLLM's issue 49250): of a request whose
    computed tokens become fewer, only the copy on the CPU changes. When this test fails, layers of
    the second runner can be loaded one by one with "recompute", too."""
    of, gpu = types.SimpleNamespace, object()
    states = of(
        req_id_to_index={"r": 0},
        prefill_len=of(np=numpy.array([600])),
        num_computed_prefill_tokens=numpy.array([512]),
        num_computed_tokens_np=numpy.array([512]),
        # Its values are those that positions and slots are computed from.
        num_computed_tokens=gpu,
    )
    runner = of(req_states=states, kv_block_zeroer=None)
    cached = of(req_ids=["r"], num_computed_tokens=[64], new_block_ids=[None])
    output = of(scheduled_cached_reqs=cached, new_block_ids_to_zero=[], kv_cache_block_copies=[])
    GPUModelRunner.update_requests(runner, output)
    assert states.num_computed_tokens_np.tolist() == [64]
    assert states.num_computed_tokens is gpu


def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it(monkeypatch):
    config, cache = configured()
    config.model_config.enable_sleep_mode = True
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    with pytest.raises(ValueError, match="leave --enable-sleep-mode out, or use vLLM 0.33"):
        check(config, cache, Options("/x", 1))
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", print, raising=False)
    assert check(config, cache, Options("/x", 1)) is False


def test_a_block_has_the_tokens_of_all_ranks_that_share_it():
    of = types.SimpleNamespace

    def tokens(size, hashed, ranks=1):
        shape = {"num_kv_heads": 8, "head_size": 64, "dtype": torch.float32}
        spec = FullAttentionSpec(block_size=size, **shape)
        config = of(kv_cache_groups=[of(kv_cache_spec=spec)], hash_block_size=hashed)
        groups = Groups(config, of(decode_context_parallel_size=ranks))
        return groups.tokens, groups.unit_hashes

    assert tokens(32, None) == (32, 1)
    assert tokens(32, 16) == (32, 2)
    assert tokens(16, 64, ranks=4) == (64, 1), "decode context parallelism"
    with pytest.raises(ValueError, match="no whole number of hashes"):
        tokens(16, 64)


def test_engines_are_counted_where_vllm_says_how_many():
    def engines(index, size, **options):
        parallel = types.SimpleNamespace(data_parallel_index=index, data_parallel_size=size)
        return engines_of(parallel, Options("/x", 1, **options))

    assert (engines(0, 1), engines(1, 4), engines(1, 1, engines=2)) == (1, 4, 2)
    with pytest.raises(ValueError, match='this is number 1; give "engines"'):
        engines(1, 1)


def test_reports_reach_a_scheduler_in_another_process(tmp_path):
    written = {4: {0: b"\0sums", 1: None}, 5: {0: b""}}
    reports = Reports(Counter({3: 1}), {3}, {9}, written, "gone", {1: "digest"})
    Legacy.leave(tmp_path, 0, reports)
    Legacy.leave(tmp_path, 1, Reports(written={5: {1: b"more"}}))
    for report in tmp_path.iterdir():
        assert report.stat().st_mode & 0o777 == 0o600, "they are the owner's, as the store is"
    taken = Legacy.take(tmp_path)
    assert taken == reports.aggregate(Reports(written={5: {1: b"more"}}))
    assert pickle.dumps(taken)
    assert Legacy.take(tmp_path) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[[", "null", "[]", "{}", "[1,2,3,4,5,6]", "[" * 100_000])
def test_last_reports_that_are_damaged_are_none(tmp_path, text):
    (tmp_path / "reports-0.json").write_text(text)
    Legacy.leave(tmp_path, 1, Reports(lost={7}))
    assert Legacy.take(tmp_path) == Reports(lost={7})
    assert os.listdir(tmp_path) == []


def test_a_load_that_fails_on_the_first_rank_only_counts_as_failed():
    half = Scheduler.__new__(Scheduler)
    half.stats, half.dead, half.place = Stats(), None, place.OwnStore
    half.strikes = Counter(loads=MAX_CONSECUTIVE_FAILURES - 1)
    half.catalog = types.SimpleNamespace(release=lambda reference: None)
    half.loads = {1: Load("r", 5, 3, workers=2, tokens=48, wait_blocks=3)}
    half._loaded(1, 1, True, 0.0)
    half._loaded(1, 1, False, 1.0)
    assert (half.loads, half.stats.data) == ({}, {"load_failures": 1})
    assert "loads failed one after the other" in half.dead


@pytest.mark.parametrize("device", ["cuda:0", "cpu", "xpu:0"])
def test_a_server_gets_the_kv_cache_where_it_is(monkeypatch, device):
    made, pool = [], ripieno.Pool(1, 4096, [0], 4096, 1, device=device)
    plane = types.SimpleNamespace(is_paced=False)
    monkeypatch.setattr(place, "register", lambda connector, caches: ([], pool))
    monkeypatch.setattr(place.ripieno, "ServedPlane", lambda *args, **_: made.append(args) or plane)
    shared = types.SimpleNamespace(file=7)
    if device == "cpu":
        monkeypatch.setattr(place, "move_to_shared", lambda connector, cache: shared)
    connector = types.SimpleNamespace(shape="shape", ranks=1, copies=1, engine="engine")
    cache = types.SimpleNamespace(is_cuda=device == "cuda:0", device=torch.device(device))
    store = place.ServedStore(connector, "socket")
    if device == "xpu:0":
        with pytest.raises(ValueError, match="on xpu:0; it shares memory of the host, or of a GPU"):
            store.open_plane(0, {"layer": [cache]})
        return
    assert store.open_plane(0, {"layer": [cache]}) == ([], made[0][2])
    assert made[0][2].file == (7 if device == "cpu" else None)


def scheduler(**attributes):
    """Returns a scheduler with nothing but these, and what is empty at first."""
    half = Scheduler.__new__(Scheduler)
    defaults = {"adapters": Adapters(), "requests": {}, "asked": {}, "saves": {}, "dead": None}
    defaults |= {"cost": Cost(adds=True), "planned": {}, "loads": {}}
    half.__dict__.update(defaults | {"loads_any": True, "block_size": 16} | attributes)
    half.stats, half.options = Stats(), attributes.get("options", Options("/x", 1))
    return half


def request(name="r", lora=None, salt=None, tokens=100):
    return types.SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        lora_request=lora,
        cache_salt=salt,
        skip_reading_prefix_cache=False,
        trace_headers=None,
    )


def test_what_cannot_be_forgotten_is_not_found():
    def refuse(namespace):
        raise ripieno.ReadOnlyError("the journal takes no records")

    half = scheduler(namespace=0, spaces={("", ""): 0})
    half.catalog = types.SimpleNamespace(bump_epoch=refuse)
    assert half.reset() is False
    assert half.matched(request(), 0) == (0, False)
    assert "could not be reset" in half.dead


def test_only_lookups_are_counted():
    """Not prompts that are shorter than a unit, nor those of requests that read no cache."""
    found = []
    half = scheduler(spaces={("", ""): 0}, load_async=False, place=place.ServedStore)
    half.groups = types.SimpleNamespace(tokens=16)
    half._lookup = types.SimpleNamespace(hit=lambda *args: found.append(args) or (6, range(6)))
    blocks = types.SimpleNamespace()
    skips, short, asked = request("skips"), request("short", tokens=16), request("asked")
    skips.skip_reading_prefix_cache = True
    for each in (skips, short):
        assert half.matched(each, 0) == (0, False)
        half.allocated(each, blocks, 0)
    assert (found, half.stats.data) == ([], {})
    assert half.matched(asked, 0) == (96, False)
    half.allocated(asked, blocks, 0)
    counted = {"lookup_tokens": 100, "missed_tokens_tail": 4, "missed_tokens_declined": 96}
    assert (len(found), half.stats.data) == (1, counted)
    half.loads_any = False
    assert half.matched(asked, 0) == (0, False)
    half.allocated(asked, blocks, 0)
    assert half.stats.data == counted


def adapted(path, weights, number=1, name="a", **more):
    """Writes an adapter's files, and returns the request for it."""
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "adapter_config.json").write_text('{"r": 8}')
    return LoRARequest(name, number, str(path), **more)


def test_adapters_of_tenants_have_namespaces_of_their_own(tmp_path):
    alice, bob = (hashlib.sha256(salt).hexdigest() for salt in (b"alice", b"bob"))
    made = []

    def describe(adapter, tenant):
        return ripieno.Namespace(adapter=adapter, tenant_salt=bytes.fromhex(tenant))

    def namespace(described):
        made.append((described.adapter, described.tenant_salt.hex()))
        return len(made)

    options = Options("/x", 1, tenants=[alice, bob])
    half = scheduler(options=options, describe=describe, epoch=3)
    half.spaces = {("", ""): 100, ("", alice): 101, ("", bob): 102}
    half.catalog = types.SimpleNamespace(namespace=namespace)
    one, other = (
        adapted(tmp_path / name, name.encode(), number) for number, name in enumerate("ab", 1)
    )

    def asked(salt, lora=None):
        made = request(f"{salt} {lora}", lora, salt)
        half.arrived(made)
        return half._space(made)

    spaces = [asked(salt) for salt in ("alice", "bob", "carol", "", None)]
    assert spaces == [101, 102, 100, 100, 100] and made == []
    for _ in range(2):
        spaces = [asked(salt, one) for salt in ("alice", "carol", None)]
        assert [*spaces, asked("alice", other)] == [1, 2, 2, 3]
    first, second = (f"3 {digest_of(each)}" for each in (one, other))
    assert made == [(first, alice), (first, ""), (second, alice)] and first != second


def test_an_adapters_digest_is_that_of_all_its_files(tmp_path):
    lora = adapted(tmp_path / "a", b"weights")
    before = digest_of(lora)
    assert len(before) == 64 and digest_of(adapted(tmp_path / "b", b"weights")) == before
    weights, config = (tmp_path / "a" / name for name in os.listdir(tmp_path / "a"))
    for path, text in ((weights, "Weights"), (config, '{"r": 9}')):
        path, stat, old = tmp_path / "a" / path.name, path.stat(), path.read_text()
        path.write_text(text[: len(old)].ljust(len(old)))
        # The same name, size and time.
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert digest_of(lora) != before, path
        path.write_text(old)
        assert digest_of(lora) == before
    more = tmp_path / "a" / "adapter_more.bin"
    more.write_bytes(b"1")
    assert digest_of(lora) != before
    more.unlink()
    (tmp_path / "a" / "README.md").write_text("text")
    assert digest_of(lora) == before
    assert digest_of(LoRARequest("a", 1, str(tmp_path / "a"), is_3d_lora_weight=True)) != before
    assert digest_of(LoRARequest("a", 1, str(tmp_path / "absent"))) == ""


def test_a_request_has_the_adapter_it_arrived_with_or_none(tmp_path):
    known, place = Adapters(), tmp_path / "a"
    lora = adapted(place, b"old")
    old = digest_of(lora)
    early, late, again = (request(name, lora) for name in ("early", "late", "again"))
    known.arrived(early)
    assert (known.digest(early), known.expected(early)) == (old, (1, old))
    # Others are in the folder, and it is not known which the workers have, or will read.
    adapted(place, b"new")
    assert known.digest(early) == old, "in this step they are asked for once"
    known.end_step()
    known.arrived(late)
    assert (known.digest(early), known.digest(late)) == ("", digest_of(lora))
    known.read({1: old})
    assert known.digest(late) == "", "the workers have the old ones"
    new = digest_of(lora)
    known.read({1: new})
    known.arrived(again)
    assert [known.digest(each) for each in (early, late, again)] == ["", "", new]
    # The files of before are back, but not at the workers.
    adapted(place, b"old")
    known.end_step()
    known.arrived(last := request("last", lora))
    assert [known.digest(each) for each in (early, again, last)] == ["", "", ""]


def test_an_adapter_in_place_of_another_one(tmp_path):
    known, place = Adapters(), tmp_path / "a"
    before = request("before", adapted(place, b"old"))
    known.arrived(before)
    known.read({1: digest_of(before.lora_request)})
    after = request("after", adapted(place, b"new", load_inplace=True))
    known.end_step()
    known.arrived(after)
    new = digest_of(after.lora_request)
    assert (known.digest(after), known.expected(after)) == (new, None)
    known.read({1: new})
    assert (known.digest(before), known.digest(after)) == ("", new)
    # vLLM's own cache has blocks of both.
    known.hit(after)
    assert known.digest(after) == ""
    other = request("other", adapted(tmp_path / "b", b"other", 2, "b"))
    known.arrived(other)
    known.hit(other)
    assert known.digest(other) == digest_of(other.lora_request)


def test_saves_of_another_adapter_are_wrong():
    half = scheduler(namespace=0, adapters=Adapters())
    half.catalog = types.SimpleNamespace(lost=lambda files: None)
    half.saves = {
        at: Save("r", at, [], [], adapter=adapter)
        for at, adapter in enumerate([None, (1, "old"), (1, "new"), (2, "old"), (3, "")])
    }
    half.reported(Reports(adapters={1: "new"}), set())
    assert [save.is_wrong for save in half.saves.values()] == [False, True, False, False, False]


def test_ranks_that_read_other_files_have_none():
    one, other = Reports(adapters={1: "a", 2: "a"}), Reports(adapters={1: "b", 3: "c"})
    assert one and one.aggregate(other).adapters == {1: "", 2: "a", 3: "c"}


def test_what_is_read_is_noted_and_told_once(tmp_path, monkeypatch):
    loads = []
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda _, lora: loads.append(lora))
    one, two = Read(), Read()
    lora = adapted(tmp_path / "a", b"old")
    assert not is_other((1, "x"), one.digests), "nothing was read yet"
    WorkerLoRAManager._load_adapter(None, lora)
    old = digest_of(lora)
    assert (loads, one.take(), two.take(), one.take()) == ([lora], {1: old}, {1: old}, {})
    WorkerLoRAManager._load_adapter(None, lora)
    assert one.take() == {}
    assert is_other((1, "x"), one.digests) and not is_other((1, old), one.digests)

    def changing(_, lora):
        adapted(tmp_path / "a", b"new")

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", changing)
    three = Read()
    WorkerLoRAManager._load_adapter(None, lora)
    assert three.take() == {1: ""}, "which of them was read is not known"


def test_all_connectors_are_told_which_blocks_are_reused():
    pool = BlockPool(4, enable_caching=False, hash_block_size=16)
    blocks, told = pool.get_new_blocks(2), [[], []]
    for each in told:
        Watchers.of(pool).watchers.append(lambda block, each=each: each.append(block.block_id))
        pool.touch(blocks)
        pool.unpin_blocks(blocks, Watchers.of(pool).reused)
    pool.free_blocks(blocks)
    numbers = sorted(block.block_id for block in pool.get_new_blocks(3))
    ours = sorted(block.block_id for block in blocks)
    assert set(ours) <= set(numbers)
    assert [sorted(each) for each in told] == [ours, ours]
    assert Watchers.of(BlockPool(4, False, 16)).watchers == []


def test_layers_of_two_models_have_no_time():
    config, cache = configured()
    options = Options("/x", 1, layer_times="/y")
    assert check(config, cache, options) is False
    config.speculative_config = object()
    with pytest.raises(ValueError, match="speculative decoding"):
        check(config, cache, options)


class Plane:
    """Starts stores when may_start is set. Layers end when may_end is set, or at once those of
    jobs that are hurried."""

    def __init__(self):
        self.may_start, self.may_end, self.calls = threading.Event(), threading.Event(), []
        self.may_end.set()
        self.hurried = set()

    def begin_store(self, files, blocks):
        return files[0]

    def start(self, job, layer, *stream):
        assert self.may_start.wait(20)
        self.calls.append((job, layer, *stream))

    def poll(self, job, layer):
        return self.may_end.is_set() or job in self.hurried

    def hurry(self, job):
        self.hurried.add(job)

    def end(self, jobs):
        assert all(self.poll(job, 0) for job in jobs)
        self.calls.append(jobs)
        of = types.SimpleNamespace
        return [of(job=job, error=None, checksums=bytes([job])) for job in jobs]


def test_a_step_waits_for_saves_whose_blocks_it_reuses():
    plane = Plane()
    saver = Saver(plane, [0, 1])
    saver.begin_step([Job(1, "a", [11], [5]), Job(2, "b", [12], [6])], [])
    saver.store(1)
    saver.begin_step([], [])
    waits = threading.Thread(target=saver.begin_step, args=([], [2]))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    assert saver.take() == []
    plane.may_start.set()
    waits.join(20)
    assert not waits.is_alive()
    # The layer that was reported first, then all others; one flush.
    assert plane.calls == [(11, 1), (12, 1), (11, 0), (12, 0), [11, 12]]
    assert [(saved.id, saved.checksums) for saved in saver.take()] == [(1, b"\x0b"), (2, b"\x0c")]
    saver.close(1)


def test_layers_are_saved_after_the_stream_that_computes_them():
    plane, streams = Plane(), iter([70, 71])
    plane.may_start.set()
    saver = Saver(plane, [0, 1], lambda: (next(streams),))
    saver.begin_step([Job(1, "a", [11], [5])], [])
    saver.store(0)
    saver.begin_step([], [])
    saver.close(20)
    assert plane.calls == [(11, 0, 70), (11, 1, 71), [11]]


def test_saves_are_dropped_at_the_end():
    plane = Plane()
    saver = Saver(plane, [0])
    saver.begin_step([Job(1, "a", [11], [5])], [])
    threading.Timer(0.3, plane.may_start.set).start()
    saver.begin_step([Job(2, "a", [12], [6])], [])
    saver.close(0)
    ended = {saved.id: saved.error for saved in saver.take()}
    assert "dropped" in ended[2]


def paced(most=2):
    """Returns a plane that holds layers back, and its saver."""
    plane = Plane()
    plane.may_start.set()
    plane.may_end.clear()
    return plane, Saver(plane, [0, 1], most=most)


def until(is_so):
    late = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < late, "it never was"
        time.sleep(0.01)


def test_layers_are_handed_over_at_once_and_ended_when_the_plane_is_done():
    plane, saver = paced(most=3)
    saver.begin_step([Job(1, "a", [11], [5])], [])
    saver.begin_step([Job(2, "b", [12], [6])], [])
    saver.end_step()
    both = [(11, 0), (11, 1), (12, 0), (12, 1)]
    until(lambda: plane.calls == both)
    time.sleep(0.05)
    assert (plane.calls, plane.hurried) == (both, set())
    plane.may_end.set()
    until(lambda: plane.calls[4:] in ([[11, 12]], [[11], [12]]))
    saver.close(20)


def test_saves_are_hurried_when_a_step_waits_for_them_or_too_many_wait():
    plane, saver = paced()
    saver.begin_step([Job(1, "a", [11], [5])], [])
    saver.begin_step([], [1])
    assert plane.calls == [(11, 0), (11, 1), [11]]
    saver.begin_step([Job(2, "a", [12, 13, 14], [6, 7, 8])], [])
    saver.end_step()
    until(lambda: plane.calls[3:] == [(12, 0), (12, 1), [12]])
    assert plane.hurried == {11, 12}


def test_a_hundred_saves_wait_at_most():
    plane, saver = paced(most=1000)
    for number in range(1, SAVES_MAX + 3):
        saver.begin_step([Job(number, "a", [number], [number])], [])
    saver.end_step()
    until(lambda: [1] in plane.calls and [2] in plane.calls)
    assert plane.hurried == {1, 2}
    plane.may_end.set()
    saver.close(20)


def test_saves_that_wait_are_hurried_at_the_end():
    plane, saver = paced()
    hurry, was_dropping = plane.hurry, []
    plane.hurry = lambda job: (was_dropping.append(saver.dropping), hurry(job))
    saver.begin_step([Job(3, "a", [15], [5])], [])
    saver.close(20)
    # Not when the time was over.
    assert was_dropping == [False]
    assert plane.calls == [(15, 0), (15, 1), [15]]
    assert [saved.error for saved in saver.take()] == [None]
