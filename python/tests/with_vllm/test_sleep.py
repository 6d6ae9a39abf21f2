"""Sleep mode, and weights that change in memory."""

import ctypes
import mmap
import threading

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import torch  # noqa: E402
from forked import life_of, live  # noqa: E402
import ripieno  # noqa: E402
from prompts import BLOCK, PROMPTS, tokens, whole  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

A, MORE = PROMPTS[0], [tokens(290), tokens(290)]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
FIXED = 0x10


def pages_of(engine):
    """Returns the KV cache's whole pages: address and length."""
    pool = engine.plane.pool
    begin = -(-pool.address // mmap.PAGESIZE) * mmap.PAGESIZE
    return begin, (pool.address + pool.length - begin) // mmap.PAGESIZE * mmap.PAGESIZE


def with_sleep(engine):
    """Gives vLLM's worker on a CPU, which ignores it, the sleep of that on a GPU (0.33): memory at
    the same addresses, but not the same memory. Nobody may touch it meanwhile."""

    def replace(protection):
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
        place, size = pages_of(engine)
        assert LIBC.mmap(place, size, protection, kind, -1, 0) == place

    def sleep(worker, level=1):
        get_kv_transfer_group().unregister_kv_caches()
        replace(0)

    def wake_up(worker, tags=None):
        replace(mmap.PROT_READ | mmap.PROT_WRITE)
        get_kv_transfer_group().restore_kv_caches()

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def naps(engine):
    with_sleep(engine)
    found = [engine.ask(A)]
    engine.settle()
    for level, prompt in enumerate(MORE, 1):
        # Some saves are in flight. vLLM aborts the request, too, but says so to a server only.
        plane = engine.plane
        plane.may_go.clear()
        name = engine.add(prompt)
        engine.step()
        assert engine.connector.saves
        engine.llm.abort_request([name])
        threading.Timer(0.2, plane.may_go.set).start()
        engine.llm.sleep(level)
        assert plane.may_go.is_set(), "the saves have ended"
        with pytest.raises(ripieno.ClosedError):
            plane.take_lost()
        engine.llm.wake_up()
        assert engine.plane is not plane
        found.append(engine.ask(A))
        engine.settle()
    assert not engine.connector.dead
    stored = engine.ask(*(prompt[: 3 * BLOCK + 1] for prompt in MORE))
    engine.llm.sleep(1)
    return found, stored[1]


@pytest.mark.parametrize("keeps", [False, True])
def test_transfers_end_before_sleep_and_begin_after_it(model, both, said, keeps):
    options = both | {"keep_on_reset": keeps}
    life = life_of(naps, model=model, options=options, plane=faults.Held)
    assert life.error is None and " ERROR " not in life.said, f"{life.error}\n{life.said[-6000:]}"
    found, stored = life.value
    again = [whole(A)] if keeps else [0]
    assert found == [([said[0]], [0]), ([said[0]], again), ([said[0]], again)]
    assert stored == [3 * BLOCK if keeps else 0] * 2, "saves that were in flight"


def retrained(engine, resets):
    said = engine.ask(A)
    engine.settle()
    for _ in range(resets):
        assert engine.llm.reset_prefix_cache(reset_connector=True)
    chance = torch.Generator().manual_seed(1)
    for weights in engine.runner.model.parameters():
        weights.data += torch.randn(weights.shape, generator=chance) * weights.std()
    other = engine.ask(A)
    assert other[0] != said[0] and other[1] == [0]
    engine.forget()
    assert engine.ask(A) == (other[0], [whole(A)]), "found with the same weights"


def ask(engine):
    found = engine.ask(A)
    engine.settle()
    return found


@pytest.mark.parametrize("resets", [1, 2])
def test_what_changed_weights_computed_is_not_found_by_the_next_engine(
    model, options, said, resets
):
    live(retrained, resets, model=model, options=options)
    assert live(ask, model=model, options=options) == ([said[0]], [0])
    assert live(ask, model=model, options=options) == ([said[0]], [whole(A)])
