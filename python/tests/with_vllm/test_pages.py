"""Whole pages for the KV cache: what refers to its memory, and when it stays where it is."""

import mmap
import types

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
from forked import live  # noqa: E402
from prompts import alone  # noqa: E402
from ripieno.vllm import pages  # noqa: E402

CONNECTOR = types.SimpleNamespace()


@pytest.fixture
def group(monkeypatch):
    """Returns the connectors that vLLM has in this process: the only one, at first."""
    found = [CONNECTOR]
    monkeypatch.setattr(pages, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(pages, "get_kv_transfer_group", lambda: found[0])
    return found


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def caches(count=4):
    """Returns views of one allocation, as vLLM's layers have them."""
    # PyTorch aligns to 64 bytes, which is a whole page by chance.
    made = [torch.zeros(count << 20, dtype=torch.int8) for _ in range(4)]
    memory = next(each for each in made if address(each) % mmap.PAGESIZE)
    return [memory[at << 20 : at + 1 << 20].view(torch.bfloat16).view(8, -1) for at in range(count)]


def test_all_views_move_together(group):
    views = caches()
    layer = types.SimpleNamespace(kv_cache=views[1].unflatten(0, (4, 2)))
    shapes = [(each.shape, each.stride(), each.storage_offset()) for each in views]
    pages.move_to_pages(CONNECTOR, views[2])
    assert address(views[0]) % pages.HUGE_BYTES == 0
    assert {address(each) for each in [*views, layer.kv_cache]} == {address(views[0])}
    assert [(each.shape, each.stride(), each.storage_offset()) for each in views] == shapes
    assert not any(each.any() for each in views)
    views[1][3, 5] = 7
    assert layer.kv_cache[1, 1, 5] == 7 and layer.kv_cache.count_nonzero() == 1
    pages.move_to_pages(CONNECTOR, views[2])
    assert views[1][3, 5] == 7, "it is moved once"


@pytest.mark.parametrize("kept", ["array", "storage", "saved", "connector", "no huge pages"])
def test_memory_that_others_use_stays(group, kept, monkeypatch):
    views = caches()
    before = address(views[0])
    if kept == "array":
        other = views[0].view(torch.uint8).numpy()
    elif kept == "storage":
        other = views[0].untyped_storage()
    elif kept == "saved":
        # A view that C++ made, which no search in Python finds.
        factor = torch.ones(views[0].shape[1], dtype=torch.bfloat16, requires_grad=True)
        other = torch.nn.functional.linear(factor, views[0])
    elif kept == "connector":
        other, group[0] = group[0], None
    else:
        other = monkeypatch.setattr(pages, "_has_huge_pages", lambda: False)
    pages.move_to_pages(CONNECTOR, views[0])
    assert {address(each) for each in views} == {before}, other


def test_a_server_shares_the_new_memory(group):
    views = caches()
    shared = pages.move_to_shared(CONNECTOR, views[2])
    assert {address(each) for each in views} == {address(views[0])}
    assert address(views[0]) % mmap.PAGESIZE == 0
    views[1][3, 5] = 7
    assert shared.buffer[1 << 20 :][: 1 << 20].count(b"\0") < 1 << 20
    views = caches()
    other = views[0].untyped_storage()
    with pytest.raises(ValueError, match="cannot be shared: something else refers"):
        pages.move_to_shared(CONNECTOR, views[0])
    del other
    group[0] = None
    with pytest.raises(ValueError, match="cannot be shared: others use its address"):
        pages.move_to_shared(CONNECTOR, views[0])


def test_an_engine_has_whole_pages(model, both):
    def ask(engine):
        layers = engine.worker.layers
        context = engine.llm.vllm_config.compilation_config.static_forward_context
        places = {address(context[name].kv_cache) for name in layers}
        places |= {address(each) for each in engine.worker.pages}
        return places, alone(engine)

    (place,), answers = live(ask, model=model, options=both)
    assert place % pages.HUGE_BYTES == 0
    assert all(tokens for tokens, *_ in answers)
