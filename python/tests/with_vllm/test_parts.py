"""Parts of the connector, without an engine."""

import threading
import time
import types

import pytest

pytest.importorskip("vllm")

from ripieno.vllm.layout import check  # noqa: E402
from ripieno.vllm.metrics import Stats  # noqa: E402
from ripieno.vllm.options import Options  # noqa: E402
from ripieno.vllm.protocol import Job, Reports  # noqa: E402
from ripieno.vllm.saver import DEPTH_BYTES, Saver  # noqa: E402


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


def test_reports_of_workers_add_up():
    one = Reports(loaded={1: 1}, spoilt={1}, lost={9}, written={4: {0: b"a"}})
    one.loaded = type(Reports().loaded)(one.loaded)
    other = Reports(written={4: {1: None}}, dead="gone")
    other.loaded.update({1: 1, 2: 1})
    both = one.aggregate(other)
    assert both.loaded == {1: 2, 2: 1}
    assert (both.spoilt, both.lost, both.dead) == ({1}, {9}, "gone")
    assert both.written == {4: {0: b"a", 1: None}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 0}, "devices: 0 was given; give a number of files from 1 on"),
        ({"devices": 1.5}, "give a number of files from 1 on"),
        ({"devices": ["/dev/nvme0n1"]}, "or drives: "),
        ({"devices": []}, "or drives: "),
        ({"overwrite": "all"}, "give one of nothing, store, anything"),
        ({"executor": "gpu"}, "give one of host, cuda"),
        ({"dram_mode": "back"}, "give one of write-through, read-ahead"),
        ({"route": "fast"}, "give one of direct, staged, host"),
        ({"io_sms": 0}, "give a whole number from 1 on"),
        ({"save_backlog": 2}, "give a share of the blocks"),
        ({"shutdown": "wait"}, 'give "drain" or "drop"'),
        ({"load_async": "no"}, "give true or false"),
        ({"drain_seconds": "long"}, "give a number from 0 on"),
        ({"layer_times": True}, "give the name of a file"),
    ],
)
def test_options_that_make_no_sense(given, message):
    with pytest.raises(ValueError, match=message):
        Options.parse({"path": "/x", "capacity": "1GiB"} | given)


def test_drives_are_devices():
    drives = ["vfio:0000:65:00.0", "vfio:0000:66:00.0"]
    assert Options.parse({"path": "/x", "capacity": "1GiB", "devices": drives}).devices == drives


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
    """What check() reads of vLLM's configuration."""
    of = types.SimpleNamespace
    config = of(
        parallel_config=of(pipeline_parallel_size=1),
        cache_config=of(prefix_caching_hash_algo="sha256"),
        kv_transfer_config=of(kv_load_failure_policy=policy),
        use_v2_model_runner=runner == 2,
    )
    return config, of(kv_cache_layout="LBHNC", kv_cache_groups=[None])


def test_pipelines_are_refused():
    config, cache = configured()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match="pipeline parallelism"):
        check(config, cache, Options("/x", 1))


def test_layers_of_two_models_have_no_time():
    config, cache = configured()
    options = Options("/x", 1, layer_times="/y")
    config.speculative_config = None
    assert check(config, cache, options) is False
    config.speculative_config = object()
    with pytest.raises(ValueError, match="speculative decoding"):
        check(config, cache, options)


class Plane:
    """Stores when it is let."""

    def __init__(self):
        self.may_start, self.calls = threading.Event(), []

    def begin_store(self, files, blocks):
        return files[0]

    def start(self, job, layer, *stream):
        assert self.may_start.wait(20)
        self.calls.append((job, layer, *stream))

    def wait(self, job, layer):
        self.calls.append(("wait", job, layer))

    def end(self, jobs):
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
    # The layer that was told of first, and all others; one flush.
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


def scheduled(bytes=1, waiting=2):
    """A saver that goes after loads, and its plane; a load is on its way."""
    plane = Plane()
    plane.may_start.set()
    saver = Saver(plane, [0, 1], schedule=waiting, layer_bytes=bytes)
    saver.give_way(True)
    return plane, saver


def until(is_so):
    for _ in range(2000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never was")


def test_saves_wait_for_loads_and_no_longer():
    plane, saver = scheduled()
    saver.begin_step([Job(1, "a", [11], [5])], [])
    saver.end_step()
    time.sleep(0.1)
    assert plane.calls == []
    saver.give_way(False)
    until(lambda: plane.calls == [(11, 0), (11, 1), [11]])
    saver.close(20)


def test_saves_do_not_wait_for_loads_when_somebody_waits_for_them():
    plane, saver = scheduled()
    saver.begin_step([Job(1, "a", [11], [5])], [])
    saver.begin_step([], [1])
    assert plane.calls == [(11, 0), (11, 1), [11]]
    # Too many of them; and the end.
    saver.begin_step([Job(2, "a", [12, 13, 14], [6, 7, 8])], [])
    saver.end_step()
    until(lambda: plane.calls[3:] == [(12, 0), (12, 1), [12]])
    saver.begin_step([Job(3, "a", [15], [5])], [])
    saver.close(20)
    assert plane.calls[6:] == [(15, 0), (15, 1), [15]]


def test_few_saves_are_in_flight_where_loads_may_come():
    plane, saver = scheduled(bytes=DEPTH_BYTES // 2)
    saver.begin_step([Job(1, "a", [11], [5]), Job(2, "a", [12], [6])], [])
    saver.give_way(False)
    saver.close(20)
    waits = [("wait", 11, 0), ("wait", 12, 0)]
    assert plane.calls == [(11, 0), (12, 0), waits[0], (11, 1), waits[1], (12, 1), [11, 12]]
