"""Identity of KV cache: a store's namespace, made of everything that changes bytes.

vLLM's hash of a block covers its tokens, salt, images, and an adapter's name and path. This module
adds the rest: resolved values of vLLM's configuration, and the identity of the weights
(adapters.py: that of adapters). The tests
walk vLLM's configuration classes: each field is in KEPT, or on their list of fields that change
nothing, with the reason.
"""

from __future__ import annotations

import dataclasses
import enum
import glob
import hashlib
import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import envs

import ripieno

from .layout import copies_of, layout_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .options import Options

KEPT = {
    "model_config": (
        "model model_weights revision code_revision hf_config hf_text_config dtype max_model_len"
        " quantization quantization_config trust_remote_code model_impl model_class_overrides"
        " disable_sliding_window multimodal_config"
    ),
    "model_config.multimodal_config": (
        "language_model_only mm_processor_kwargs mm_device_do_normalize mm_hasher_algorithm"
        " mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method"
        " allow_missing_mm_embeddings"
    ),
    "cache_config": (
        "cache_dtype kv_cache_dtype_skip_layers sliding_window prefix_caching_hash_algo"
        " kv_sharing_fast_prefill swa_bounded_replay use_replayssm replayssm_buffer_len"
        " use_kda_recoverssm"
    ),
    "parallel_config": (
        "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size"
        " decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size"
    ),
    "device_config": "device_type",
    "load_config": "load_format model_loader_extra_config ignore_patterns",
    "attention_config": (
        "backend backend_per_kind use_trtllm_attention indexer_kv_dtype use_non_causal"
        " disable_flashinfer_q_quantization use_prefill_query_quantization mla_prefill_backend"
    ),
    "lora_config": "lora_dtype target_modules default_mm_loras enable_tower_connector_lora",
    "speculative_config": (
        "method model revision code_revision quantization kv_cache_dtype max_model_len"
        " draft_tensor_parallel_size draft_model_config parallel_drafting"
    ),
    "mamba_config": "",
    "diffusion_config": "canvas_length max_denoising_steps",
    "additional_config": "",
}
"""By configuration, the fields that change bytes; all fields where none is named."""

NEWER = {"attention_config": "trtllm_ragged_backend"}
"""Same, but fields that vLLM 0.32 does not have."""

ENVIRONMENT = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
)
"""Variables that are in no configuration: quantization, and the order in a block."""

REWRITTEN = ("deepseek_yarn", "deepseek_llama_scaling")
"""RoPE types that the classes of DeepSeek's models write into the model's configuration, which is
the scheduler's if that has the only worker. They follow from its other fields."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
CODE = ".py"
"""Of a model that has code of its own."""


def namespace_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: Options,
    adapter: str = "",
    tenant: str = "",
) -> ripieno.Namespace:
    """Returns the namespace of an engine, or of one of its adapters (the digest of its files) or
    tenants (that of a salt)."""
    groups = kv_cache_config.kv_cache_groups
    model = vllm_config.model_config
    layout = {
        "layout": kv_cache_config.kv_cache_layout,
        "seed": os.environ.get("PYTHONHASHSEED", ""),
    }
    rows = layout_of(kv_cache_config).rows
    if rows != sorted(rows):
        layout["rows"] = rows
    if len(groups) == 1:
        layout["spec"] = plain(groups[0].kv_cache_spec)
    else:
        # A key has the number of its group.
        specs = [[plain(group.kv_cache_spec), group.layer_names] for group in groups]
        layout["groups"] = hashlib.sha256(_json(specs)).hexdigest()
    config = described(vllm_config)
    if copies_of(vllm_config, kv_cache_config, options) > 1:
        # Latents are the same with any number of ranks.
        config["parallel_config"]["tensor_parallel_size"] = 1
        if "speculative_config" in config:
            config["speculative_config"]["draft_tensor_parallel_size"] = 1
    known: list[Any] = [vllm.__version__, options.weights_id, config]
    if variables := {it: plain(getattr(envs, it, None)) for it in ENVIRONMENT if it in os.environ}:
        known.append(variables)
    if model and vllm_config.load_config.load_format == "dummy":
        # vLLM generates these weights from the seed.
        known.append(model.seed)
    return ripieno.Namespace(
        weights=hashlib.sha256(_json(known)).digest(),
        layout=_json(layout).decode(),
        dtype=f"{model.dtype} {vllm_config.cache_config.cache_dtype}",
        block_tokens=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
        adapter=adapter,
        tenant_salt=bytes.fromhex(tenant),
        label=_label(_name(model.model), tenant),
    )


def described(vllm_config: VllmConfig) -> dict[str, Any]:
    """Returns all fields in KEPT as plain data."""
    return {
        name: _kept(getattr(vllm_config, name), name)
        for name in KEPT
        if "." not in name and getattr(vllm_config, name) is not None
    }


def _kept(config: Any, name: str) -> Any:
    if not KEPT[name]:
        return plain(config)
    found = {}
    newer = [field for field in NEWER.get(name, "").split() if hasattr(config, field)]
    for field in KEPT[name].split() + newer:
        value = getattr(config, field)
        if field in ("model", "model_weights") and value:
            value = origin_of(value, config.revision)
        elif field.endswith("_path") and value:
            value = origin_of(value)
        elif field == "revision":
            # Covered by the model's origin if that is known: a branch may move to another commit.
            continue
        elif field == "draft_model_config" and value is not None:
            value = _kept(value, "model_config")
        elif f"{name}.{field}" in KEPT and value is not None:
            value = _kept(value, f"{name}.{field}")
        found[field] = plain(value)
    return found


def origin_of(path: str, revision: str | None = None) -> list[Any]:
    """Returns the identity of weights: repository and commit, or the files of a directory and of its
    folders with their sizes and times."""
    place = place_of_weights(path, revision)
    if place is None:
        return [path, revision]
    if commit := re.search(r"/models--([^/]+)/snapshots/([^/]+)$", place):
        return [commit[1], commit[2]]
    if not os.path.isdir(place):
        return [place, *_stat(place)]
    # Some models have weights in folders, such as transformer/.
    names = [name for form in ("*", "*/*") for name in glob.glob(form, root_dir=place)]
    names = sorted(name for name in names if name.endswith((*WEIGHTS, CODE)))
    return [place, *([name, *_stat(os.path.join(place, name))] for name in names)]


def place_of_weights(path: str, revision: str | None = None) -> str | None:
    """Returns where weights are: the path, or that in the hub's cache; None if they are not there."""
    return os.path.realpath(path) if os.path.exists(path) else _cached(path, revision)


def _cached(name: str, revision: str | None) -> str | None:
    """Returns the path of a hub's model or adapter in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except ValueError:
            # The name is not valid for the hub.
            return None
        if isinstance(found, str):
            return os.path.dirname(found)
    return None


def _stat(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _name(path: str) -> str:
    return os.path.basename(os.path.realpath(path) if os.path.exists(path) else path)


def _label(name: str, tenant: str) -> str:
    """Returns a label of at most 64 bytes: the model, and the begin of a tenant's digest."""
    of = f" salt {tenant[:8]}" if tenant else ""
    return name.encode()[: 64 - len(of)].decode(errors="ignore") + of


def plain(value: Any) -> Any:
    """Returns a value as JSON data that is the same in each process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in _as_read(value).items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        # The file's path and the writing version are not part of a model's configuration.
        left_out = ("_name_or_path", "transformers_version")
        return plain({k: v for k, v in value.to_dict().items() if k not in left_out})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return [type(value).__name__, plain(fields)]
    # The name, without an address.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _as_read(config: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a model's configuration as it was before its class was made."""
    rope, kind = config.get("rope_parameters"), str(config.get("model_type"))
    if isinstance(rope, dict) and kind.startswith(("deepseek", "kimi")):
        if rope.get("rope_type") in REWRITTEN:
            return config | {"rope_parameters": rope | {"rope_type": "yarn"}}
    return config


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
