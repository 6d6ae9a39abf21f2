#!/usr/bin/env bash
# Dynamo's mocker: KV cache of DeepSeek is 25 times too large, of half of the others too small.
#
# ai-dynamo 1.6.1, Python 3.11. The function by which the mocker has the bytes of a token's K and V
# (`compute_kv_bytes_per_token`, used unless they are given), for files config.json as they are in
# aiconfigurator-core 0.12.0; beside it what the fields of each file say.
#
# Guess: layers x 2 x KV heads x head_dim x 2 bytes, with head_dim from the file; one latent vector
#        of 576 numbers a layer for models with MLA; and only layers that have K and V.
# Seen:  head_dim is always hidden_size / heads, also if the file has another one, and MLA's fields
#        and the kinds of layers are not looked at. Nothing is said. Right for Llama 3.1; Qwen3 30B
#        has half, DeepSeek, Kimi and GLM 21 to 25 times what they need, as all their heads count.
#
#            Llama 3.1 8B: 131072, by its file 131072
#            Qwen3 8B: 147456, by its file 147456
#            Qwen3 32B: 163840, by its file 262144
#            Qwen3 30B A3B: 49152, by its file 98304
#            gpt-oss 120B: 51840, by its file 73728
#            Qwen3.5 27B: 218112, by its file 65536
#            DeepSeek V3: 1748992, by its file 70272
#            GLM 5: 1916928, by its file 89856
#
# For a plan of disaggregated serving or of a KV tier: sizes of blocks in host memory and times of
# transfers come from this number: give --kv-bytes-per-token. (gpt-oss: up to its window; beyond it,
# half of the layers stop growing.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install --no-deps ai-dynamo==1.6.1 aiconfigurator-core==0.12.0
cat >ask.py <<'PYTHON'
import importlib.util
import json
import os
import shutil
from importlib import metadata


def installed(package, end):
    return next(f for f in metadata.files(package) if str(f).endswith(end)).locate()


where = installed("ai-dynamo", "mocker/utils/kv_cache.py")
spec = importlib.util.spec_from_file_location("kv_cache", where)
kv_cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kv_cache)


def by_file(config):
    config = config.get("text_config", config)
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    layers = sum(kind != "linear_attention" for kind in kinds)
    if "kv_lora_rank" in config:
        return layers * 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    width = config["hidden_size"] // config["num_attention_heads"]
    return layers * 2 * 2 * config["num_key_value_heads"] * config.get("head_dim", width)


for title, name in {
    "Llama 3.1 8B": "meta-llama--Meta-Llama-3.1-8B",
    "Qwen3 8B": "Qwen--Qwen3-8B",
    "Qwen3 32B": "Qwen--Qwen3-32B",
    "Qwen3 30B A3B": "Qwen--Qwen3-30B-A3B",
    "gpt-oss 120B": "openai--gpt-oss-120b",
    "Qwen3.5 27B": "Qwen--Qwen3.5-27B",
    "DeepSeek V3": "deepseek-ai--DeepSeek-V3",
    "GLM 5": "zai-org--GLM-5",
}.items():
    path = installed("aiconfigurator-core", f"model_configs/{name}_config.json")
    os.makedirs(name)
    shutil.copy(path, f"{name}/config.json")
    right = by_file(json.loads(path.read_text()))
    print(f"{title}: {kv_cache.compute_kv_bytes_per_token(name)}, by its file {right}")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
Llama 3.1 8B: 131072, by its file 131072
Qwen3 8B: 147456, by its file 147456
Qwen3 32B: 163840, by its file 262144
Qwen3 30B A3B: 49152, by its file 98304
gpt-oss 120B: 51840, by its file 73728
Qwen3.5 27B: 218112, by its file 65536
DeepSeek V3: 1748992, by its file 70272
GLM 5: 1916928, by its file 89856
TEXT
diff expected seen && echo "as written above"
