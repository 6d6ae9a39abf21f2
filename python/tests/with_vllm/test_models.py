"""Published models: vLLM's own grouping of their KV caches is taken, or refused before serving.

docs/reference/vllm.md has a row for each of them, as these tests compute it.
"""

import pathlib
import types
from collections import Counter

import pytest

pytest.importorskip("vllm")

import ripieno.vllm  # noqa: E402
from published import MODELS  # noqa: E402
from ripieno.vllm.groups import Groups  # noqa: E402
from ripieno.vllm.layout import check, layout_of  # noqa: E402
from ripieno.vllm.options import Options  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_cache_interface import iter_layer_specs  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    # vLLM 0.32.
    planning = kv_cache_utils

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs/reference/vllm.md"
BLOCKS = 9
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "latent",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "latent window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
}
REFUSED = {
    "Whisper large v3": "CrossAttentionSpec, whose blocks vLLM does not find by their tokens",
    "GLM-5.3 Flash": "CircularBufferSpec, whose blocks vLLM does not find by their tokens",
}


def planned(model):
    """Returns vLLM's configuration, and that of the KV cache for a worker and the scheduler."""
    of = types.SimpleNamespace
    cache = of(
        kv_cache_layout=None,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=0,
        prefix_match_unit=None,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256",
        cache_dtype="auto",
        block_size=model.layers[0].block_size,
    )
    cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout[cache.kv_cache_layout]
    first = model.layers[0]
    heads = getattr(first, "num_kv_heads", 0)

    def shaped(heads):
        return of(get_num_kv_heads=lambda parallel: heads, get_head_size=lambda: first.head_size)

    draft = of(draft_model_config=shaped(model.draft), draft_parallel_config=None)
    described = of(hf_text_config=of(**model.text), enable_sleep_mode=False)
    described.get_num_kv_heads, described.get_head_size = vars(shaped(heads)).values()
    described.get_total_num_hidden_layers = lambda: len(model.layers)
    config = of(
        cache_config=cache,
        model_config=described,
        attention_config=of(hisparse_config=None),
        scheduler_config=of(disable_hybrid_kv_cache_manager=False),
        speculative_config=draft if model.draft else None,
        parallel_config=of(
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="RipienoConnector",
            kv_role="kv_both",
            kv_connector_module_path="ripieno.vllm",
            kv_connector_extra_config={"path": "/nowhere", "capacity": "1GiB"},
        ),
        use_v2_model_runner=False,
    )
    layout = resolve_kv_cache_layout(config, [list(model.layouts)], model.layers)
    # An indexer belongs to the layer of the latents before it.
    kinds = ("attn", "indexer") if "index_topk" in model.text else ("attn",)
    layers = {
        f"model.layers.{at // len(kinds)}.{kinds[at % len(kinds)]}": spec
        for at, spec in enumerate(model.layers)
    }
    groups = planning.get_kv_cache_groups(config, layers)
    worker = planning.get_kv_cache_config_from_groups(config, groups, 1 << 50)
    worker.kv_cache_layout = layout.name
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([worker])
    cache.block_size = min(group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups)
    _, worker.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config)
    scheduler.hash_block_size = worker.hash_block_size
    return config, worker, scheduler


def row(name):
    """Returns a model's row of the table."""
    config, worker, _ = planned(MODELS[name])
    is_async = check(config, worker, Options("/x", 1))
    groups, layout = Groups(worker, config.parallel_config), layout_of(worker)
    kinds = Counter()
    for group in worker.kv_cache_groups:
        found = {KINDS[type(spec).__name__] for spec in iter_layer_specs(group.kv_cache_spec)}
        kinds[" and ".join(sorted(found))] += 1
    plural = {
        kind: kind if kind == "full" or count == 1 else f"{kind}s" for kind, count in kinds.items()
    }
    listed = ", ".join(f"{count} {plural[kind]}" for kind, count in kinds.items())
    assert is_async or layout.layers, "nothing is loaded before a step"
    how = "between steps" if is_async else "layer by layer"
    size = len(layout.rows) * layout.page / 2**20
    return f"| {name} | {listed} | {groups.tokens} | {size:.2f} | {how} |"


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_a_published_model_is_taken(name):
    assert row(name) in DOCS.read_text().splitlines()
    config, worker, scheduler = planned(MODELS[name])
    assert layout_of(scheduler) == layout_of(worker), "both halves open the same store"
    halves = [Groups(each, config.parallel_config) for each in (worker, scheduler)]
    assert vars(halves[0]) == vars(halves[1])


@pytest.mark.parametrize(
    ("name", "time"),
    [("DeepSeek V3.2", 1.13), ("GLM-5", 1.10), ("Qwen3 32B, EAGLE-3 with 4 heads", 1.08)],
)
def test_layers_of_several_sizes_overlap_with_their_loads(name, time):
    """The time of a step that loads as long as it computes, in units of that: 2 without overlap."""
    layout = layout_of(planned(MODELS[name])[1])
    last = {int(key.split(".")[2]): row for key, row in layout.layers.items() if "attn" in key}
    now = 0.0
    for number in sorted(last):
        loaded = (last[number] + 1) / len(layout.rows)
        now = max(now, loaded) + 1 / len(last)
    assert round(now, 2) == time


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_model_is_refused_before_it_serves(name):
    config, worker, _ = planned(MODELS[name])
    for role in KVConnectorRole:
        with pytest.raises(
            ValueError, match=f"^RipienoConnector: .*{REFUSED[name]}: serve .* with"
        ):
            ripieno.vllm.RipienoConnector(config, role, worker)
    assert any(line.startswith(f"| {name} | refused") for line in DOCS.read_text().splitlines())


if __name__ == "__main__":
    print(*(f"| {each} | refused" if each in REFUSED else row(each) for each in MODELS), sep="\n")
