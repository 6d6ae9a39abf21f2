"""Layouts of the KV cache, by vLLM's own grouping of real layers, with bytes through a store.

vLLM's CPU backend runs none of these models.
"""

import dataclasses
import types

import pytest

pytest.importorskip("vllm")

import ripieno  # noqa: E402
import torch  # noqa: E402
from ripieno.vllm.groups import Groups  # noqa: E402
from ripieno.vllm.layout import FIRST, layout_of, register, unwritten  # noqa: E402
from ripieno.vllm.options import Options  # noqa: E402
from ripieno.vllm.protocol import Job, Tasks  # noqa: E402
from ripieno.vllm.worker import Worker  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

try:
    from vllm.v1.core import kv_cache_planning as vllm_groups
except ImportError:
    # vLLM 0.32.
    from vllm.v1.core import kv_cache_utils as vllm_groups

BLOCKS = 9


def attention(heads=8, window=None, size=64):
    shape = {"block_size": size, "num_kv_heads": heads, "head_size": 128, "dtype": torch.bfloat16}
    if window:
        return SlidingWindowSpec(sliding_window=window, **shape)
    return FullAttentionSpec(**shape)


def latent(bytes):
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=bytes, dtype=torch.uint8)


def state(page):
    return MambaSpec(
        block_size=64,
        shapes=((3, 1024), (12, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


PAGE = 2 * 64 * 8 * 128 * 2
"""Bytes of a page of 8 heads."""

INDEXED = "an indexer beside latents (DeepSeek V3.2, GLM-5)"
DRAFTED = "a draft with fewer heads (EAGLE-3)"
MODELS = {
    INDEXED: [latent(656), latent(132)] * 61,
    DRAFTED: [attention()] * 4 + [attention(heads=2)],
    "sliding windows (Gemma 3)": [attention(window=512)] * 5 + [attention()],
    "states (Qwen3-Next)": [state(PAGE)] * 3 + [attention()],
}


def config_of(specs, layout):
    """Returns vLLM's configuration of a KV cache of these layers."""
    of = types.SimpleNamespace
    cache = of(num_gpu_blocks_override=BLOCKS, prefix_cache_retention_interval=0)
    cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout[layout]
    config = of(
        cache_config=cache,
        attention_config=of(hisparse_config=None),
        scheduler_config=of(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )
    layers, number = {}, -1
    for spec in specs:
        # An indexer belongs to the layer of the latents before it.
        is_indexer = getattr(spec, "head_size", None) == 132
        number += not is_indexer
        layers[f"model.layers.{number}.{'indexer.k_cache' if is_indexer else 'attn'}"] = spec
    groups = vllm_groups.get_kv_cache_groups(config, layers)
    made = vllm_groups.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    made.kv_cache_layout = layout
    return made


def views(config, memory):
    """Returns each layer's KV cache, as vLLM's workers make it."""
    found, specs = {}, {}
    for group in config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs |= {name: inner.get(name, group.kv_cache_spec) for name in group.layer_names}
    for tensor in config.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        layout = KVCacheLayout[config.kv_cache_layout]
        made = create_kv_cache_views(memory, spec, config.num_blocks, layout, tensor)
        found |= dict(zip(tensor.layers, made, strict=True))
    return found


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_all_layers_come_back(model, layout, tmp_path):
    config = config_of(MODELS[model], layout)
    is_mixed = len(config.kv_cache_groups) == 1
    if is_mixed and layout == "LBHNC":
        with pytest.raises(ValueError, match="pages have different sizes, .* in layout LBHNC"):
            layout_of(config)
        return
    memory = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    caches = views(config, memory)
    found = layout_of(config)
    connector = types.SimpleNamespace(layout=found, _kv_cache_config=config)
    pages, pool = register(connector, caches)
    assert len(pages) == len(found.rows)
    tokens = Groups(config, types.SimpleNamespace(decode_context_parallel_size=1)).tokens
    shape = ripieno.Shape(len(found.rows), 1, found.page, tokens)
    memory.random_(-128, 128)
    with ripieno.Store(tmp_path / "store", shape, pool, capacity="64MiB") as store:
        # As bytes: some are no numbers.
        caches = {name: cache.view(torch.uint8) for name, cache in caches.items()}
        before = {name: cache.clone() for name, cache in caches.items()}
        keys = [bytes([at]) * 32 for at in range(4)]
        with store.store(keys, [1, 2, 3, 4]) as request:
            request.move_all()
            request.commit()
        memory.zero_()
        with store.load(keys, [5, 8, 6, 7]) as request:
            request.move_all()
        for name, cache in caches.items():
            for source, target in zip([1, 2, 3, 4], [5, 8, 6, 7], strict=True):
                assert torch.equal(cache[target], before[name][source]), name
            for other in (0, 1, 2, 3, 4):
                assert not cache[other].any(), "another block was changed"


class SlowPlane:
    """A plane whose loads arrive when they are waited for, with the blocks of an earlier cache."""

    is_bounced, placement = False, "host"

    def __init__(self, pages):
        self.pages, self.before = pages, [page.clone() for page in pages]
        self.blocks, self.arrived = [], []

    def begin_load(self, files, blocks, checksums, request, step):
        self.blocks = blocks
        return 1

    def start(self, job, row):
        """All rows are in flight from now on."""

    def wait(self, job, row):
        self.arrived.append(row)
        self.pages[row][self.blocks] = self.before[row][self.blocks]

    def end(self, jobs):
        left = set(range(len(self.pages))) - set(self.arrived)
        for row in left if jobs else ():
            self.wait(jobs[0], row)
        return [types.SimpleNamespace(job=job, error=None, is_mismatch=False) for job in jobs]

    def take_lost(self):
        return []


def step(model, layout, memory):
    """Loads blocks in a step of a model. Returns the rows that had arrived when each layer was
    computed, by name, and the names of those whose blocks had not."""
    config = config_of(MODELS[model], "BLHNC")
    caches = views(config, memory)
    connector = types.SimpleNamespace(layout=layout, _kv_cache_config=config)
    pages, pool = register(connector, caches)
    plane = SlowPlane(pages)
    of = types.SimpleNamespace
    place = of(plane=plane, is_paced=False, paced=None)
    place.open_plane = lambda rank, caches: (pages, pool)
    place.join = lambda job, row, stream: plane.wait(job, row)
    worker = Worker(
        of(
            place=place,
            options=Options("/x", 1),
            _vllm_config=of(parallel_config=of(rank=0), lora_config=None),
            _kv_cache_config=config,
            layout=layout,
            shape=ripieno.Shape(len(pages), 1, layout.page, 64),
            world=1,
            copies=1,
            groups=of(is_hybrid=False),
            layers=layout.layers,
            computed=layout.computed,
            blocks=BLOCKS,
        ),
        caches,
    )
    names = sorted(caches, key=lambda name: (int(name.split(".")[2]), "attn" in name))
    before = {name: caches[name].view(torch.uint8).clone() for name in names}
    blocks, seen, wrong = [2, 5, 7], {}, []
    for page in pages:
        page[blocks] = 0
    worker.tasks = Tasks(loads=[Job(1, "r", [1, 2, 3], blocks, [b""], False, 192, None)])
    worker.start_loads(has_hooks=True)
    for name in names:
        # vLLM has no hook for an indexer, which comes before its layer's attention.
        if "attn" in name:
            worker.wait_layer(name)
        seen[name] = len(plane.arrived)
        if not torch.equal(caches[name].view(torch.uint8)[blocks], before[name][blocks]):
            wrong.append(name)
    worker.finish_loads()
    worker.saver.close(0)
    assert sorted(plane.arrived) == list(range(len(pages))), "once each"
    return seen, wrong


@pytest.mark.parametrize("model", [INDEXED, DRAFTED])
def test_layers_of_several_sizes_load_while_others_are_computed(model):
    config = config_of(MODELS[model], "BLHNC")
    layout = layout_of(config)
    memory = torch.randint(-128, 128, (config.kv_cache_tensors[0].size,), dtype=torch.int8)
    seen, wrong = step(model, layout, memory)
    assert wrong == []
    counts = list(seen.values())
    assert counts == sorted(counts), "layers need more and more"
    assert counts[0] <= len(layout.rows) / 2, "the first one does not wait for all"
    # Plans that forget a row, or what is computed before the first hook, are noticed.
    early = {name: max(0, last - 1) for name, last in layout.layers.items()}
    unready = {name: last for name, last in layout.layers.items() if name != FIRST}
    for layers in (early, unready) if model == INDEXED else (early,):
        assert step(model, dataclasses.replace(layout, layers=layers), memory)[1]


def test_what_a_groups_layers_do_not_write_is_known():
    of = types.SimpleNamespace

    def group(spec, *names):
        return of(layer_names=names, kv_cache_spec=spec)

    full, small = attention(), state(PAGE)
    for layout, layer_stride, block_stride in (
        ("LBHNC", BLOCKS * PAGE, PAGE),
        ("BLHNC", PAGE, 2 * PAGE),
    ):
        tensors = [
            of(layers=names, offset=0, layer_stride=layer_stride, block_stride=block_stride)
            for names in (["a", "b"], ["c"], ["d", "e"])
        ]
        groups = [group(full, "a", "b"), group(full, "c"), group(small, "d", "e")]
        config = of(kv_cache_layout=layout, kv_cache_tensors=tensors, kv_cache_groups=groups)
        found = layout_of(config)
        counts = []
        for parts in unwritten(config, found):
            assert all(0 <= begin < end <= found.page for _, begin, end in parts)
            counts.append(sum(end - begin for _, begin, end in parts))
        assert counts == [0, PAGE, 2 * (PAGE - small.state_content_size_bytes)], layout
        (row, begin, end), *_ = unwritten(config, found)[1]
        assert found.rows[row] + begin == layer_stride, "behind the first layer"
