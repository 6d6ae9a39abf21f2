"""Blocks that are encoded: engines find them again, bit by bit, in three quarters of the bytes."""

import pytest
import torch

pytest.importorskip("vllm")

from forked import life_of, live  # noqa: E402
from prompts import PROMPTS, STORED, alone  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402

BF16 = {"dtype": "bfloat16"}
CODEC = {"codec": "exp3", "lba": 512}


@pytest.fixture(scope="module")
def plain(model):
    """Answers and KV bytes in bf16, without a store."""
    return live(alone, model=model, **BF16)


@pytest.fixture
def options(tmp_path):
    return {"path": str(tmp_path / "store")} | CODEC


def counted(engine):
    """Returns the answers, and the counts of the store."""
    return alone(engine), engine.plane.stats(), engine.connector.catalog.stats()


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize("more", [{}, {"dram": "8MiB"}], ids=["files", "dram"])
def test_every_bit_comes_back(load_async, more, model, options, plain):
    options |= {"load_async": load_async} | more
    settings = {"model": model, "options": options} | BF16
    answers, saved, catalog = live(counted, **settings)
    assert [said for said, _, _ in answers] == [said for said, _, _ in plain]
    assert saved["codec_unfit_blocks_total"] == 0
    raw = saved["codec_encoded_bytes_total"]
    assert saved["stored_bytes_total"] * 4 == raw * 3, saved
    assert catalog.stored > 0
    answers, loaded, _ = live(counted, **settings)
    for (said, cached, pages), (expected, _, computed), stored in zip(
        answers, plain, STORED, strict=True
    ):
        assert (said, cached, pages) == (expected, stored, computed)
    assert loaded["loaded_bytes_total"] * 4 == loaded["codec_decoded_bytes_total"] * 3 > 0


def test_blocks_that_do_not_fit_are_computed_again(model, options, plain):
    """A KV cache of random bits in the first layer of every other block."""

    def spoil(engine):
        store, told = engine.worker.saver.store, []
        engine.scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)

        def spoiled(row):
            if row == 0:
                page = engine.worker.pages[0]
                for saving in engine.worker.saver.step:
                    for block in saving.blocks[1::2]:
                        page[block] = torch.randint(0, 255, page[block].shape, dtype=torch.uint8)
            store(row)

        engine.worker.saver.store = spoiled
        engine.ask(PROMPTS[3], max_tokens=1)
        engine.settle()
        unfit = engine.plane.stats()["codec_unfit_blocks_total"]
        ours = [event for event in told if getattr(event, "medium", None) == "STORAGE"]
        announced = sum(len(event.block_hashes) for event in ours)
        return unfit, engine.connector.catalog.stats().stored, announced

    settings = {"model": model, "options": options} | BF16
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    assert live(spoil, kv_events_config=config, **settings) == (8, 8, 8)
    answers = live(alone, **settings)
    assert [said for said, _, _ in answers] == [said for said, _, _ in plain]
    assert answers[3][1] == 32, "those before the first that is missing"


def test_another_kind_of_kv_cache_is_refused(model, options):
    life = life_of(alone, model=model, options=options)
    assert "codec: it is for a KV cache of torch.bfloat16, and this one has torch.float32" in (
        life.error or ""
    )


def test_a_store_without_it_is_refused(model, options):
    live(alone, model=model, options=options | {"codec": "none"}, **BF16)
    life = life_of(alone, model=model, options=options, **BF16)
    assert "made with codec none, and codec exp3 was asked for" in (life.error or "")
