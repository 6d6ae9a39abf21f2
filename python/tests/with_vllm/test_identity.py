"""Contents of the namespace: all of vLLM's configuration that changes KV bytes."""

import copy
import dataclasses
import hashlib
import os
import shutil
import types
import typing

import pytest

pytest.importorskip("vllm")

import torch  # noqa: E402
import vllm  # noqa: E402
from ripieno.vllm.groups import Groups  # noqa: E402
from ripieno.vllm.identity import (  # noqa: E402
    KEPT,
    NEWER,
    described,
    namespace_of,
    origin_of,
    plain,
)
from ripieno.vllm.options import Options  # noqa: E402
from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.config import (  # noqa: E402
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

IGNORED = {
    "when and where tokens are computed, not what of": (
        "scheduler_config offload_config compilation_config kernel_config optimization_level"
        " performance_mode shutdown_timeout instance_id"
    ),
    "what is seen of it": (
        "observability_config logging_config profiler_config kv_events_config aux_output_config"
    ),
    "what is done with logits": "structured_outputs_config watermark_config reasoning_config",
    "ours": "kv_transfer_config",
    "of encoders, whose outputs are known by their inputs": "ec_transfer_config ec_manager_config",
    "new weights are followed by a reset": "weight_transfer_config",
    "where a table of the weights is": "engram_config",
    "made of the model's quantization and of its files": "quant_config",
    "what hashes have in them, or prompts": (
        "model_config.tokenizer model_config.tokenizer_mode model_config.tokenizer_revision"
        " model_config.skip_tokenizer_init model_config.enable_prompt_embeds"
        " cache_config.hash_block_size cache_config.prefix_match_unit"
        " model_config.multimodal_config.limit_per_prompt"
        " model_config.multimodal_config.enable_mm_embeds"
        " model_config.multimodal_config.media_io_kwargs"
        " model_config.multimodal_config.interleave_mm_strings"
    ),
    "what is done with hidden states": (
        "model_config.runner model_config.convert model_config.pooler_config"
        " model_config.return_sampling_mask model_config.max_logprobs model_config.logprobs_mode"
        " model_config.use_fp64_gumbel model_config.enable_trace_replay"
        " model_config.generation_config model_config.override_generation_config"
        " model_config.logits_processors model_config.io_processor_plugin"
        " model_config.word_embeddings_untied_by_checkpoint"
    ),
    "in hf_config and hf_text_config, resolved": (
        "model_config.hf_config_path model_config.config_format model_config.hf_overrides"
    ),
    "of weights that are drawn, and there alone": "model_config.seed",
    "of a draft, as a model": "model_config.spec_target_max_model_len",
    "a view of a model, which an engine is not": "model_config.is_submodel_config",
    "of how it is called, run and reached": (
        "model_config.served_model_name model_config.allowed_local_media_path"
        " model_config.allowed_media_domains model_config.hf_token"
        " model_config.renderer_num_workers model_config.enforce_eager"
        " model_config.disable_cascade_attn model_config.allow_deprecated_quantization"
    ),
    "of sleep": (
        "model_config.enable_sleep_mode model_config.sleep_preserve_parameter_names"
        " model_config.sleep_mode_backend model_config.sleep_mode_offload_cudagraph"
        " model_config.enable_nccl_comm_suspend model_config.enable_cumem_allocator"
    ),
    "of how encoders run": (
        "model_config.multimodal_config.mm_processor_cache_gb"
        " model_config.multimodal_config.mm_processor_cache_type"
        " model_config.multimodal_config.mm_shm_cache_max_object_size_mb"
        " model_config.multimodal_config.mm_encoder_only"
        " model_config.multimodal_config.mm_encoder_tp_mode"
        " model_config.multimodal_config.mm_encoder_attn_backend"
        " model_config.multimodal_config.mm_encoder_fp8_scale_save_path"
        " model_config.multimodal_config.mm_encoder_fp8_scale_save_margin"
        " model_config.multimodal_config.skip_mm_profiling"
        " model_config.multimodal_config.mm_tensor_ipc"
        " model_config.multimodal_config.mm_ipc_gpu_memory_gb"
    ),
    "in the KV cache's spec and layout, resolved": (
        "cache_config.block_size cache_config.user_specified_block_size"
        " cache_config.kv_cache_layout cache_config.mamba_page_size_padded"
        " cache_config.skip_page_size_padded cache_config.effective_attention_block_size"
        " cache_config._block_size_resolved cache_config.mamba_block_size"
        " cache_config.mamba_cache_dtype cache_config.mamba_ssm_cache_dtype"
        " cache_config.mamba_cache_mode"
    ),
    "how much KV cache there is, and what is kept of it": (
        "cache_config.gpu_memory_utilization cache_config.num_gpu_blocks_override"
        " cache_config.enable_prefix_caching cache_config.prefix_cache_retention_interval"
        " cache_config.num_gpu_blocks cache_config.num_cpu_blocks"
        " cache_config.kv_cache_size_tokens cache_config.kv_cache_max_concurrency"
        " cache_config.cache_hit_alignment_tokens cache_config.kv_cache_memory_bytes"
        " cache_config.kv_offloading_size cache_config.kv_offloading_backend"
        " cache_config.is_attention_free cache_config.enable_mamba_shared_prefix_checkpoint"
    ),
    "in device_type": "device_config.device",
    "how weights get to memory": (
        "load_config.download_dir load_config.safetensors_load_strategy"
        " load_config.safetensors_prefetch_num_threads load_config.safetensors_prefetch_block_size"
        " load_config.device load_config.use_tqdm_on_load load_config.pt_load_map_location"
    ),
    "another order of the same sums": (
        "attention_config.flash_attn_version"
        " attention_config.flash_attn_max_num_splits_for_cuda_graph"
        " attention_config.tokenspeed_mla_min_split_kv"
        " attention_config.tq_max_kv_splits_for_cuda_graph"
        " attention_config.minimax_m3_msa_decode_backend attention_config.indexer_sparse_logits"
        " attention_config.sparse_mla_force_mqa"
        " attention_config.sparse_mla_prefill_workspace_factor attention_config.flex_attn_block_m"
        " attention_config.flex_attn_block_n attention_config.flex_attn_q_block_size"
        " attention_config.flex_attn_kv_block_size attention_config.hisparse_config"
    ),
    "how many adapters there may be, and how they are laid out": (
        "lora_config.max_lora_rank lora_config.max_loras lora_config.fully_sharded_loras"
        " lora_config.max_cpu_loras lora_config.specialize_active_lora"
        " lora_config.enable_mixed_moe_lora_format lora_config.enable_moe_shared_loras"
        " lora_config.max_lora_cls_labels"
    ),
    "what is guessed and accepted: only accepted tokens are stored": (
        "speculative_config.enforce_eager speculative_config.num_speculative_tokens"
        " speculative_config.tensor_parallel_size speculative_config.moe_backend"
        " speculative_config.attention_backend speculative_config.disable_padded_drafter_batch"
        " speculative_config.disable_eagle_block_drop"
        " speculative_config.use_local_argmax_reduction"
        " speculative_config.use_heterogeneous_vocab speculative_config.prompt_lookup_max"
        " speculative_config.prompt_lookup_min speculative_config.index_share_for_mtp_iteration"
        " speculative_config.num_speculative_tokens_per_batch_size"
        " speculative_config.suffix_decoding_max_tree_depth"
        " speculative_config.suffix_decoding_max_cached_requests"
        " speculative_config.suffix_decoding_max_spec_factor"
        " speculative_config.suffix_decoding_min_token_prob"
        " speculative_config.draft_load_config speculative_config.rejection_sample_method"
        " speculative_config.synthetic_acceptance_rates"
        " speculative_config.synthetic_acceptance_length"
        " speculative_config.enable_adaptive_verification speculative_config.draft_sample_method"
        " speculative_config.dspark_draft_topk"
    ),
    "the engine's own, once more": (
        "speculative_config.target_model_config speculative_config.target_parallel_config"
        " speculative_config.draft_parallel_config"
    ),
}
"""By reason: fields that may change without a change of the namespace."""

IGNORED_SINCE_0_33 = {
    "what is seen of it": "watchdog_config",
    "of another connector": "cache_config.simple_cpu_offload_num_blocks",
    "how work is shared out among ranks": (
        "attention_config.indexer_tp_shard_min_rows attention_config.minimax_m3_indexer_cp"
    ),
    "what is guessed and accepted: only accepted tokens are stored": (
        "speculative_config.fly_window_size speculative_config.fly_entropy_threshold"
        " speculative_config.fly_entropy_top_k speculative_config.xpress_topc"
        " speculative_config.draft_lm_head_quantization"
    ),
    "in the hashes": "speculative_config.disable_lookahead_block_hashes",
}
"""Same, of fields that vLLM 0.32 does not have."""

IS_0_33 = not vllm.__version__.startswith("0.32.")

PARALLEL = "how work is shared out among processes; each rank's part is in the store's name"
"""Reason for all fields of parallel_config that are not kept."""

NESTED = {
    "model_config": ModelConfig,
    "model_config.multimodal_config": MultiModalConfig,
    "lora_config": LoRAConfig,
    "speculative_config": SpeculativeConfig,
}


def classes():
    """Returns the configuration classes with kept fields, by name."""
    types_of = typing.get_type_hints(VllmConfig)
    found = {name: NESTED.get(name) or types_of[name] for name in KEPT if name in types_of}
    for name, kind in found.items():
        options = [each for each in typing.get_args(kind) if dataclasses.is_dataclass(each)]
        found[name] = options[0] if options else kind
    return found | NESTED


def test_each_field_is_in_the_namespace_or_there_is_a_reason():
    lists = [*IGNORED.values(), *(IGNORED_SINCE_0_33.values() if IS_0_33 else ())]
    ignored = [name for names in lists for name in names.split()]
    assert len(ignored) == len(set(ignored)), "one reason each"
    there, missing = set(), []
    for each in dataclasses.fields(VllmConfig):
        there.add(each.name)
        if each.name not in KEPT and each.name not in ignored:
            missing.append(each.name)
    for name, kind in classes().items():
        if not KEPT[name]:
            continue
        kept = KEPT[name].split() + (NEWER.get(name, "").split() if IS_0_33 else [])
        fields = {each.name for each in dataclasses.fields(kind)}
        assert set(kept) <= fields, f"vLLM has no such fields of {name} any more"
        there |= {f"{name}.{field}" for field in fields}
        if name != "parallel_config":
            missing += [
                f"{name}.{field}"
                for field in fields - set(kept)
                if f"{name}.{field}" not in ignored
            ]
        assert not {f"{name}.{field}" for field in kept} & set(ignored)
    assert not missing, "put them into KEPT, or say why not"
    assert set(ignored) <= there, "vLLM has these no more"


@pytest.fixture(scope="module")
def config(model):
    args = EngineArgs(
        model=str(model), dtype="float32", skip_tokenizer_init=True, enable_lora=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    )  # fmt: skip
    return args.create_engine_config()


def cache(block_size=32):
    of = types.SimpleNamespace
    spec = of(block_size=block_size)
    tensor = of(layers=["layer"], offset=0, layer_stride=64, block_stride=64)
    return of(
        kv_cache_layout="LBHNC",
        kv_cache_groups=[of(kv_cache_spec=spec)],
        kv_cache_tensors=[tensor],
    )


def changed(config, name, value):
    """Returns a copy with another value in a field such as `model_config.dtype`."""
    config = copy.copy(config)
    first, _, rest = name.partition(".")
    value = changed(getattr(config, first), rest, value) if rest else value
    object.__setattr__(config, first, value)
    return config


OPTIONS = Options("/x", 1)


def test_each_of_them_changes_it(config):
    before = namespace_of(config, cache(), OPTIONS)
    assert namespace_of(copy.deepcopy(config), cache(), OPTIONS) == before
    for name, fields in KEPT.items():
        for field in fields.split():
            if name == "model_config" and field == "revision":
                continue  # Part of the model: see the next test.
            at = config
            for part in name.split("."):
                at = at and getattr(at, part)
            if at is None:
                assert name in ("model_config.multimodal_config", "diffusion_config"), name
                continue
            whole = f"{name}.{field}"
            if whole in KEPT:
                continue
            # A draft is a model, too, so its dtype is changed.
            whole += ".dtype" if field == "draft_model_config" else ""
            # A value of another type, equal to no real one.
            other = changed(config, whole, "another value")
            assert namespace_of(other, cache(), OPTIONS) != before, whole
    assert (
        namespace_of(changed(config, "mamba_config", "another value"), cache(), OPTIONS) != before
    )
    assert namespace_of(config, cache(16), OPTIONS) != before
    assert namespace_of(config, cache(), Options("/x", 1, weights_id="1")) != before
    assert namespace_of(changed(config, "additional_config", {"a": 1}), cache(), OPTIONS) != before
    for harmless in ("instance_id", "model_config.served_model_name", "model_config.seed"):
        other = changed(config, harmless, "another value")
        assert namespace_of(other, cache(), OPTIONS) == before, harmless
    drawn = changed(config, "load_config.load_format", "dummy")
    again = changed(drawn, "model_config.seed", 7)
    assert namespace_of(drawn, cache(), OPTIONS) != namespace_of(again, cache(), OPTIONS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Quantization that vLLM 0.32 reads nowhere else (layers/quantization).
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"b_dtype": "int4", "force_requant": true}'),
        ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"a_dtype": "int8"}'),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_CPU_INT4_W4A8", "0"),
        # The order of numbers in a block, of one shape (rocm_aiter_fa.py).
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1"),
    ],
)
def test_what_only_the_environment_says_is_in_it(config, monkeypatch, name, value):
    before = namespace_of(config, cache(), OPTIONS)
    monkeypatch.setenv(name, value)
    assert namespace_of(config, cache(), OPTIONS) != before


def test_groups_are_in_it(config):
    def named(*groups):
        made = cache()
        made.kv_cache_groups = [
            types.SimpleNamespace(
                kv_cache_spec=types.SimpleNamespace(block_size=size), layer_names=layers
            )
            for size, layers in groups
        ]
        return namespace_of(config, made, OPTIONS)

    before = named((16, ["a", "b"]), (32, ["c", "d"]))
    assert before == named((16, ["a", "b"]), (32, ["c", "d"]))
    assert before.block_tokens == 32
    assert before != named((32, ["c", "d"]), (16, ["a", "b"]))
    assert before != named((16, ["a", "c"]), (32, ["b", "d"]))
    assert before != named((16, ["a", "b"]))


def test_rope_is_in_it_however_it_was_set(model, config):
    def text(**overrides):
        args = EngineArgs(
            model=str(model), dtype="float32", skip_tokenizer_init=True, hf_overrides=overrides
        )
        return described(args.create_engine_config())["model_config"]["hf_text_config"]

    before = text()
    assert before == text(), "it is the same each time"
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 1024
    assert before != text(rope_parameters=rope)
    assert before != text(rope_parameters=yarn)


def test_weights_are_known_by_their_files(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "m")
    before = origin_of(str(path))
    assert origin_of(f"{path}/") == before
    assert origin_of(os.path.relpath(path)) == before
    (tmp_path / "link").symlink_to(path)
    assert origin_of(str(tmp_path / "link")) == before
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert origin_of(str(path)) != before
    before = origin_of(str(path))
    (path / "modeling.py").write_text("")
    assert origin_of(str(path)) != before, "it has code of its own"
    commit = "0" * 39 + "1"
    for place in ("here", "there"):
        snapshot = tmp_path / place / "models--org--name" / "snapshots" / commit
        shutil.copytree(path, snapshot)
        assert origin_of(str(snapshot)) == ["org--name", commit], "wherever the cache is"
    for name in ("org/that-nobody-has", "/no/place at all"):
        assert origin_of(name, "main") == [name, "main"]


@pytest.mark.parametrize(
    "name",
    [
        # Where vLLM 0.32 has Cosmos 3's (allow_patterns_overrides), MiMo-Audio's, and those of
        # --load-format tensorizer (tensorizer_dir is the model's).
        "transformer/model.safetensors",
        "audio_tokenizer/pytorch_model.bin",
        "model.tensors",
    ],
)
def test_weights_are_looked_for_where_vllm_reads_them(name, tmp_path):
    path, before = tmp_path / name, origin_of(str(tmp_path))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"weights")
    added = origin_of(str(tmp_path))
    os.utime(path, ns=(1, 1))
    assert before != added != origin_of(str(tmp_path))


def test_an_adapter_has_a_namespace(config):
    of = [namespace_of(config, cache(), OPTIONS, digest) for digest in ("", "ab", "cd")]
    assert len(set(map(str, of))) == 3 and of[1] == namespace_of(config, cache(), OPTIONS, "ab")


def test_a_tenant_has_a_namespace_and_a_label(config):
    digest = hashlib.sha256(b"salt").hexdigest()
    own, common = (namespace_of(config, cache(), OPTIONS, "", it) for it in (digest, ""))
    assert (own.tenant_salt.hex(), common.tenant_salt) == (digest, b"")
    assert own.label == f"{common.label} salt {digest[:8]}"
    config.model_config.model = "/models/" + "é" * 60
    label = namespace_of(config, cache(), OPTIONS, "", digest).label
    assert label.endswith(f"é salt {digest[:8]}") and 60 < len(label.encode()) <= 64


def test_images_are_told_apart_by_all_of_their_hash():
    init_none_hash(sha256)

    def keys(image):
        feature = MultiModalFeatureSpec(None, "image", image, PlaceholderRange(0, 48))
        params, hasher = SamplingParams(), get_request_block_hasher(16, sha256)
        request = Request("r", [5] * 64, params, None, mm_features=[feature], block_hasher=hasher)
        return Groups.hashes_of(types.SimpleNamespace(hashes=[1]), request, 0, 0, 4)

    one, other = keys("a" * 60 + "beef"), keys("b" * 60 + "beef")
    assert len(one) == len(other) == 4
    assert not set(one) & set(other)


def test_values_are_plain_and_the_same_in_each_process():
    class Thing:
        pass

    assert plain({"b": {3, 1}, "a": (torch.float16, Thing())}) == {
        "b": ["1", "3"],
        "a": ["torch.float16", f"{__name__}.{Thing.__qualname__}"],
    }
