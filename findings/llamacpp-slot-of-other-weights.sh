#!/usr/bin/env bash
# llama.cpp: a saved slot is restored into a server with other weights, and its KV cache is used.
#
# xllamacpp 2026.10.11549 (llama.cpp's server as a wheel), Python 3.11, CPU. Two models of 2 layers,
# made here, of one shape but with other random weights. A prompt of 501 tokens, greedy.
#
# Guess: POST /slots/0?action=save writes what the KV cache belongs to, a hash of the weights or at
#        least the model's name, and action=restore in a server with another model is refused.
# Seen:  only shapes and types are compared. The other model restores all tokens, takes 500 of the
#        501 for computed, and answers what neither model answers. The same with a scale of RoPE in
#        the options: K was rotated for another one. Refused, with the same words as for a full
#        cache, is what is the same model with another type of cache or without flash attention.
#
#            model 1: 501 computed
#            model 1, restored: n_restored 508, 1 computed, as before: yes
#            model 2: 501 computed
#            model 2, restored from model 1: n_restored 508, 1 computed, as before: no
#            model 1 with RoPE scale 1/4: 501 computed
#            model 1 with RoPE scale 1/4, restored: n_restored 508, 1 computed, as before: no
#            model 1 with cache in q8_0, restored: HTTP 400
#            model 1 without flash attention, restored: HTTP 400
#
# For KV cache in files: a name of the file that does not contain the weights and the options of
# RoPE turns an update of the model into wrong answers, which nothing reports.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install xllamacpp==2026.10.11549 gguf==0.19.0
cat >ask.py <<'PYTHON'
import json
import os
import urllib.error
import urllib.request

import gguf
import numpy as np
import xllamacpp

WIDTH, HEADS, LAYERS, WORDS = 128, 4, 2, 260
PROMPT = [1] + [3 + i * 7 % 256 for i in range(500)]


def model(seed):
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(f"{seed}.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("llama")
    bytes_of_text = (f"<0x{i:02X}>" for i in range(256))
    writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_of_text, "\u2581"])
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1])
    names = "attn_norm ffn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split()
    names = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in names]
    for name in ("token_embd", "output_norm", "output", *names):
        rows = WORDS if name in ("token_embd", "output") else WIDTH
        values = np.ones(WIDTH) if "norm" in name else random.normal(0, 0.3, (rows, WIDTH))
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(seed, **options):
    params = xllamacpp.CommonParams()
    params.model.path = f"{seed}.gguf"
    params.n_ctx, params.n_parallel, params.port = 1024, 1, 0
    params.warmup = params.fit_params = False
    params.slot_save_path = os.getcwd() + "/slots/"
    for name, value in options.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def post(server, path, **body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def complete(server):
    sampling = dict(temperature=0, n_predict=8, ignore_eos=True, return_tokens=True)
    answer = post(server, "/completion", prompt=PROMPT, id_slot=0, cache_prompt=True, **sampling)
    return answer["tokens"], f"{answer['timings']['prompt_n']} computed"


def fresh(title, seed, **options):
    server = serve(seed, **options)
    tokens, computed = complete(server)
    print(f"{title}: {computed}")
    if not os.listdir("slots"):
        post(server, "/slots/0?action=save", filename="slot")
    return tokens


def restored(title, tokens, seed, **options):
    server = serve(seed, **options)
    try:
        count = post(server, "/slots/0?action=restore", filename="slot")["n_restored"]
    except urllib.error.HTTPError as error:
        print(f"{title}: HTTP {error.code}")
        return
    again, computed = complete(server)
    same = "yes" if again == tokens else "no"
    print(f"{title}: n_restored {count}, {computed}, as before: {same}")


os.mkdir("slots")
model(1)
model(2)
tokens = fresh("model 1", 1)
restored("model 1, restored", tokens, 1)
restored("model 2, restored from model 1", fresh("model 2", 2), 2)
linear = xllamacpp.llama_rope_scaling_type.LLAMA_ROPE_SCALING_TYPE_LINEAR
scaled = dict(rope_scaling_type=linear, rope_freq_scale=0.25)
title = "model 1 with RoPE scale 1/4"
restored(f"{title}, restored", fresh(title, 1, **scaled), 1, **scaled)
q8 = xllamacpp.ggml_type.GGML_TYPE_Q8_0
restored("model 1 with cache in q8_0, restored", tokens, 1, cache_type_k=q8, cache_type_v=q8)
off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
restored("model 1 without flash attention, restored", tokens, 1, flash_attn_type=off)
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
model 1: 501 computed
model 1, restored: n_restored 508, 1 computed, as before: yes
model 2: 501 computed
model 2, restored from model 1: n_restored 508, 1 computed, as before: no
model 1 with RoPE scale 1/4: 501 computed
model 1 with RoPE scale 1/4, restored: n_restored 508, 1 computed, as before: no
model 1 with cache in q8_0, restored: HTTP 400
model 1 without flash attention, restored: HTTP 400
TEXT
diff expected seen && echo "as written above"
