#!/usr/bin/env bash
# llm-d's planner, hf-mem: a KV cache in the type of the weights, and of layers that have none.
#
# llm-d-planner 0.3.3 with transformers 5.24.0, hf-mem 0.5.6, Python 3.11. Bytes for each of 32,768
# tokens, from files config.json as they are in aiconfigurator-core 0.12.0, all else by default;
# beside it what the fields of each file say, in bfloat16, the default of engines (without the keys
# of sparse attention).
#
# Guess: latent vectors for models with MLA, for which one has a kind of attention and the other a
#        type (fp8_ds_mla); only layers that have K and V; and bfloat16, as weights of 8 or 4 bits
#        do not make the cache smaller: engines have another option for that.
# Seen:  each of it once or more. llm-d's planner tells MLA by the names of two classes, so DeepSeek
#        V3.2, GLM, and Kimi have all heads, 14 to 28 times too much; it takes the type of weights
#        for the cache, so gpt-oss has a quarter, and a byte if a file has the type elsewhere, as of
#        models with vision. hf-mem has all heads for MLA, and for FP8 weights half. Layers with
#        states count as full attention in both.
#
#            Llama 3.1 8B: 131072, llm-d 131072, hf-mem 131072
#            Qwen3 30B A3B: 98304, llm-d 98304, hf-mem 98304
#            Qwen3-VL 8B: 147456, llm-d 73728, hf-mem 147456
#            MiniMax M2.5: 253952, llm-d 126976, hf-mem 126976
#            gpt-oss 120B: 73728, llm-d 19584, hf-mem error
#            Qwen3.5 27B: 65536, llm-d 131072, hf-mem 262144
#            DeepSeek V3: 70272, llm-d 70272, hf-mem 874496
#            DeepSeek V3.2: 70272, llm-d 1998848, hf-mem 874496
#            Kimi K2.5: 70272, llm-d 999424, hf-mem 1748992
#            GLM 5: 89856, llm-d 1277952, hf-mem 1277952
#
# For a plan of GPUs or of a KV tier: check it by hand for whatever is not plain attention in
# bfloat16. (gpt-oss: up to its window; beyond it, half of the layers stop growing.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install 'llm-d-planner[estimation]==0.3.3' transformers==5.24.0 hf-mem==0.5.6
venv/bin/pip -q install --no-deps aiconfigurator-core==0.12.0
cat >ask.py <<'PYTHON'
import json
import shutil
import warnings
from importlib import metadata
from pathlib import Path

from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size, resolve_kv_cache_dtype
from planner.capacity_planner import KVCacheDetail
from transformers import AutoConfig

TOKENS = 32_768


def by_file(config):
    config = config.get("text_config", config)
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    layers = sum(kind != "linear_attention" for kind in kinds)
    if "kv_lora_rank" in config:
        return layers * 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    width = config["hidden_size"] // config["num_attention_heads"]
    return layers * 2 * 2 * config["num_key_value_heads"] * config.get("head_dim", width)


def by_llm_d(folder):
    detail = KVCacheDetail("model", AutoConfig.from_pretrained(folder), TOKENS)
    return detail.per_request_kv_cache_bytes // TOKENS


def by_hf_mem(config):
    # As its `run` does it, which asks the hub for the file.
    text = config.get("text_config", config)
    for key in ("dtype", "torch_dtype", "quantization_config"):
        if key in config:
            text.setdefault(key, config[key])
    try:
        kind = resolve_kv_cache_dtype(text, "auto", None, "model")
    except RuntimeError:
        return "error"
    return compute_safetensors_kv_cache_size(text, kind, TOKENS) // TOKENS


warnings.simplefilter("ignore")
files = metadata.files("aiconfigurator-core")
for title, name in {
    "Llama 3.1 8B": "meta-llama--Meta-Llama-3.1-8B",
    "Qwen3 30B A3B": "Qwen--Qwen3-30B-A3B",
    "Qwen3-VL 8B": "Qwen--Qwen3-VL-8B-Instruct",
    "MiniMax M2.5": "MiniMaxAI--MiniMax-M2.5",
    "gpt-oss 120B": "openai--gpt-oss-120b",
    "Qwen3.5 27B": "Qwen--Qwen3.5-27B",
    "DeepSeek V3": "deepseek-ai--DeepSeek-V3",
    "DeepSeek V3.2": "deepseek-ai--DeepSeek-V3.2",
    "Kimi K2.5": "moonshotai--Kimi-K2.5",
    "GLM 5": "zai-org--GLM-5",
}.items():
    path = next(file for file in files if file.name == f"{name}_config.json").locate()
    folder = Path(name)
    folder.mkdir()
    shutil.copy(path, folder / "config.json")
    config = json.loads(Path(path).read_text())
    right, llm_d = by_file(config), by_llm_d(folder)
    print(f"{title}: {right}, llm-d {llm_d}, hf-mem {by_hf_mem(config)}", flush=True)
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
Llama 3.1 8B: 131072, llm-d 131072, hf-mem 131072
Qwen3 30B A3B: 98304, llm-d 98304, hf-mem 98304
Qwen3-VL 8B: 147456, llm-d 73728, hf-mem 147456
MiniMax M2.5: 253952, llm-d 126976, hf-mem 126976
gpt-oss 120B: 73728, llm-d 19584, hf-mem error
Qwen3.5 27B: 65536, llm-d 131072, hf-mem 262144
DeepSeek V3: 70272, llm-d 70272, hf-mem 874496
DeepSeek V3.2: 70272, llm-d 1998848, hf-mem 874496
Kimi K2.5: 70272, llm-d 999424, hf-mem 1748992
GLM 5: 89856, llm-d 1277952, hf-mem 1277952
TEXT
diff expected seen && echo "as written above"
