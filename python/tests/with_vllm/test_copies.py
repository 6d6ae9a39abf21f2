"""A KV cache that each rank has whole: one rank stores it, and all load it."""

import hashlib
import os
import pathlib
import shutil
import signal
import types

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import latents  # noqa: E402
import ripieno.vllm  # noqa: E402
from forked import life_of, live  # noqa: E402
from prompts import PIPELINE, PROMPTS, whole  # noqa: E402
from published import MODELS  # noqa: E402
from ripieno import capacity  # noqa: E402
from ripieno.vllm import identity  # noqa: E402
from ripieno.vllm.layout import copies_of  # noqa: E402
from ripieno.vllm.options import Options  # noqa: E402
from serving import Server  # noqa: E402
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs  # noqa: E402

STORED = [whole(prompt, latents.BLOCK) for prompt in PROMPTS]
BLOCKS = sum(STORED) // latents.BLOCK - 2 * 320 // latents.BLOCK
"""Different blocks of all prompts, three of which share a prefix."""
SHAPE = ripieno.Shape(latents.LAYERS, 1, latents.BLOCK * (512 + 64) * 4, latents.BLOCK)


class Seen(faults.Plane):
    """Leaves a file for each load and store, which names its process, and has the digests of its
    blocks."""

    def __init__(self, path, rank, shape, pool, **options):
        super().__init__(path, rank, shape, pool, **options)
        self.place = pathlib.Path(path).parent.parent

    def ended(self, report):
        is_load = report.job in self.loads
        blocks = self.loads[report.job][0] if is_load else self.stores[report.job]
        rows = range(self.shape.layers)
        digests = [
            hashlib.sha256(b"".join(self.page(row, block).tobytes() for row in rows)).hexdigest()
            for block in blocks
        ]
        name = f"{'loaded' if is_load else 'stored'}-{os.getpid()}-{report.job}"
        (self.place / name).write_text("\n".join(digests))
        return report


def seen(place, what):
    """Returns by process the digests of blocks that it "loaded" or "stored", and forgets them."""
    found = {}
    for file in pathlib.Path(place).glob(f"{what}-*"):
        process = file.name.split("-")[1]
        found[process] = found.get(process, set()) | set(file.read_text().split())
        file.unlink()
    return list(found.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return latents.make(tmp_path_factory.mktemp("model") / "latents")


def settings_of(model, ranks, **more):
    # No block becomes full while 8 tokens are generated.
    # With AMX vLLM would choose a backend that does not compute in float32.
    own = {"block_size": latents.BLOCK, "attention_backend": "CPU_MLA"}
    own |= {"num_gpu_blocks_override": 256, "tensor_parallel_size": ranks}
    return {"model": model} | own | more


def ask(engine):
    """Returns answers and cached tokens of each prompt, when all of them are stored."""
    answers = engine.ask(*PROMPTS, max_tokens=8)
    engine.settle()
    return answers


def twice(engine):
    first = ask(engine)
    engine.forget()
    return first, ask(engine)


@pytest.fixture(scope="module")
def said(model):
    """Tokens of each prompt's answer, without a store."""
    answers, cached = live(ask, **settings_of(model, 1))
    assert len({tuple(said) for said in answers}) == len(answers), "tokens depend on prompts"
    return answers


@pytest.mark.parametrize(("writers", "readers"), [(1, [2, 4]), (2, [1, 4, 2]), (4, [1])])
def test_any_number_of_ranks_reads_what_any_other_stored(writers, readers, model, options, said):
    place = pathlib.Path(options["path"]).parent
    assert live(ask, plane=Seen, options=options, **settings_of(model, writers))[0] == said
    (stored,) = seen(place, "stored")
    assert len(stored) == BLOCKS, "once"
    made = capacity.sizes(options["path"])
    assert [name.split("-")[0] for name in made] == ["tp1"]
    assert list(made.values()) == [32 << 20], "the one rank has all of the capacity"
    for ranks in readers:
        found = live(ask, plane=Seen, options=options, **settings_of(model, ranks))
        assert found == (said, STORED)
        assert seen(place, "loaded") == [stored] * ranks, "the same bytes on each rank"
        assert seen(place, "stored") == []
    assert capacity.sizes(options["path"]) == made


@pytest.mark.parametrize("load_async", [False, True])
def test_ranks_with_host_memory_read_what_was_stored_last(load_async, model, options, said):
    """Files are used again and again, and each rank has what was in them in its memory."""
    options |= {"dram": "16MiB", "capacity": "8MiB", "load_async": load_async, "pacing": True}

    def reused(engine):
        found, catalog = [], engine.connector.catalog
        for prompt in PROMPTS * 2:
            asked = []
            for _ in range(3):
                asked.append(engine.ask(prompt, max_tokens=8))
                engine.forget()
            found.append(asked)
            catalog.evict(catalog.stats().files)
            catalog.sync()
        return found, catalog.stats().files

    settings = settings_of(model, 2, options=options, policy="recompute")
    life = life_of(reused, **settings)
    print(life.said[-6000:])
    assert life.error is None
    found, files = life.value
    assert max(STORED) < files * latents.BLOCK < sum(STORED), "files are used again"
    for asked, answer, stored in zip(found, said * 2, STORED * 2, strict=True):
        assert asked == [([answer], [cached]) for cached in (0, stored, stored)]
    assert "did not arrive" not in life.said
    # Nobody would forget what was in the files.
    blind = type("Blind", (faults.Plane,), {"forget": lambda self, files: None})
    life = life_of(reused, plane=blind, **settings)
    assert "did not arrive" in life.said, "checksums differ"


def test_ranks_of_a_pipeline_have_parts_of_which_each_is_stored_once(options, said, tmp_path):
    # Equal numbers of layers.
    model = latents.make(tmp_path / "four", layers=4)
    answers, _ = live(ask, **settings_of(model, 1))
    pipeline = settings_of(model, 2, **PIPELINE)
    first, second = live(twice, plane=Seen, options=options, **pipeline)
    assert (first[0], second) == (answers, (answers, STORED))
    place = pathlib.Path(options["path"]).parent
    stored, loaded = seen(place, "stored"), seen(place, "loaded")
    assert len(stored) == 2 and stored[0].isdisjoint(stored[1]), "each stage has its own layers"
    assert len(loaded) == 4 and all(each in stored for each in loaded)
    # Without tensor parallelism it is the same store.
    found = live(ask, options=options, **settings_of(model, 1, **PIPELINE))
    assert found == (answers, STORED)


class RankFails(faults.Plane):
    """Fails the first load or the stores of the ranks of a number."""

    copy, loads_fail = 0, True

    def __init__(self, path, rank, shape, pool, **options):
        super().__init__(path, rank, shape, pool, **options)
        self.fails = options["copy"] == self.copy

    def ended(self, report):
        first = next(iter(self.loads), None)
        fails = report.job == first if self.loads_fail else report.job in self.stores
        if self.fails and fails:
            report.error = "a rank failed because a test says so"
        return report


@pytest.mark.parametrize("number", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed_again_on_all(number, model, both, said):
    settings = settings_of(model, 2, options=both, policy="recompute")
    live(ask, **settings)
    life = life_of(ask, plane=type("Fails", (RankFails,), {"copy": number}), **settings)
    assert (life.error, life.value[0]) == (None, said)
    assert "a rank failed because a test says so" in life.said
    assert live(ask, **settings) == (said, STORED)


def test_what_the_rank_that_stores_did_not_store_is_not_found(model, options, said):
    settings = settings_of(model, 2, options=options)
    fails = {"loads_fail": False}
    life = life_of(ask, plane=type("Fails", (RankFails,), fails), **settings)
    assert (life.error, life.value[0]) == (None, said)
    assert "blocks were not stored" in life.said
    assert live(ask, **settings)[1] == [0] * len(PROMPTS)
    # Nobody asks the others.
    others = type("Fails", (RankFails,), fails | {"copy": 1})
    again = options | {"path": options["path"] + "2"}
    live(ask, plane=others, **settings | {"options": again})
    assert live(ask, **settings | {"options": again}) == (said, STORED)


class RankDies(faults.Plane):
    """Kills the ranks of a number in their second store or load."""

    copy = 0

    def __init__(self, path, rank, shape, pool, **options):
        super().__init__(path, rank, shape, pool, **options)
        self.dies = options["copy"] == self.copy

    def end(self, jobs):
        if self.dies and len(self.loads) + len(self.stores) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().end(jobs)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_leaves_whole_blocks_only(number, model, options, said):
    dies = type("Dies", (RankDies,), {"copy": number})
    settings = settings_of(model, 2, options=options)
    # The other rank waits for this one, and vLLM for the other.
    soon = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "3"}
    assert life_of(twice, plane=dies, environment=soon, **settings).error
    answers, cached = live(ask, **settings)
    assert answers == said
    assert all(found <= stored for found, stored in zip(cached, STORED, strict=True))
    assert live(ask, **settings) == (said, STORED)


def test_ranks_share_a_server(model, tmp_path, said):
    with Server(tmp_path, SHAPE) as server:
        options = {"server": server.socket}
        first, second = live(twice, options=options, **settings_of(model, 2))
        assert (first[0], second) == (said, (said, STORED))
        assert server.settled()["files_stored"] == BLOCKS, "once"
        assert live(ask, options=options, **settings_of(model, 1)) == (said, STORED)
        assert live(ask, options=options, **settings_of(model, 4)) == (said, STORED)
        status = server.settled()
        assert (status["files_stored"], status["refused_calls"]) == (BLOCKS, 0)


def test_a_store_with_a_copy_of_each_rank_is_left_alone(model, options, said, monkeypatch):
    """As it was made before: it has a name of its own, and its part of the capacity."""
    with monkeypatch.context() as before:
        for module in (ripieno.vllm, identity):
            before.setattr(module, "copies_of", lambda *_: 1)
        assert live(ask, options=options, **settings_of(model, 2))[0] == said
    (old,) = capacity.sizes(options["path"])
    assert old.startswith("tp2-")
    settings = settings_of(model, 2)
    life = life_of(ask, options=options, **settings)
    assert f"others there are {old} (32.00 MiB)" in life.error and "or remove" in life.error
    more = options | {"capacity": "64MiB"}
    assert live(ask, options=more, **settings)[1] == [0] * len(PROMPTS)
    shutil.rmtree(pathlib.Path(options["path"]) / old)
    assert live(ask, options=options, **settings) == (said, STORED)


def test_only_what_all_ranks_have_is_stored_by_one():
    of, options = types.SimpleNamespace, Options("/x", 1)

    def copies(model, mla=True, ranks=8, dcp=1, draft=None, options=options, more=()):
        config = of(
            model_config=of(use_mla=mla),
            speculative_config=draft and of(draft_model_config=draft),
            parallel_config=of(tensor_parallel_size=ranks, decode_context_parallel_size=dcp),
        )
        # All layers in one group, as vLLM has them if only their sizes differ.
        specs = {str(at): spec for at, spec in enumerate((*MODELS[model].layers, *more))}
        one = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs)
        groups = [one] if model == "DeepSeek V3.2" else specs.values()
        return copies_of(config, of(kv_cache_groups=[of(kv_cache_spec=it) for it in groups]), options)

    for model in ("DeepSeek V3, R1; Kimi K2", "DeepSeek V3.2", "DeepSeek V4 Flash"):
        assert copies(model) == 8
        assert copies(model, ranks=1) == 1
        assert copies(model, dcp=2) == 1, "each rank has other tokens"
        assert copies(model, draft=of(use_mla=True)) == 8
        assert copies(model, draft=of(use_mla=False)) == 1, "its heads are divided"
        files, drives = ({"devices": devices} for devices in (4, ["vfio:65:00.0"]))
        assert copies(model, options=Options("/x", 1, store=files)) == 8
        assert copies(model, options=Options("/x", 1, store=drives)) == 1
    assert copies("Kimi Linear 48B A3B") == 1, "its states are divided"
    assert copies("Llama 3.1 8B", mla=False) == 1
    with pytest.raises(ValueError, match="use --tensor-parallel-size 1"):
        copies("DeepSeek V3.2", more=MODELS["Llama 3.1 8B"].layers)
