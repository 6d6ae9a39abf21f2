#!/usr/bin/env bash
# llama.cpp: prompts that share more than half replace each other, with three slots and RAM free.
#
# xllamacpp 2026.10.11549 (llama.cpp's server as a wheel), Python 3.11, CPU. A model of 2 layers,
# made here; a cache of 8 GiB in RAM, the default. Three prompts of 501 tokens that begin alike are
# asked for in turn, twice; shown is how many tokens of each are computed.
#
# Guess: each prompt gets a slot as long as there are empty ones, and one that leaves a slot goes to
#        the cache in RAM, which has room for thousands: each is computed once.
# Seen:  a prompt that has more than a tenth in common with what a slot holds gets that slot, while
#        others are empty (slot_prompt_similarity). And what it replaces there goes to the RAM only
#        if less than half of it is also the beginning of the new one. With 240 tokens in common
#        each prompt is computed once, with 260 its own part is computed each time.
#
#            1 slot, 0 in common: 501 500 500 1 1 1
#            1 slot, 240 in common: 501 260 260 1 1 1
#            1 slot, 260 in common: 501 240 240 240 240 240
#            4 slots, 260 in common: 501 240 240 240 240 240
#            4 slots, 400 in common: 501 100 100 100 100 100
#            4 slots, similarity 0.9, 400 in common: 501 501 100 1 1 1
#
# For conversations with a long system prompt, or with tools, which most of a prompt can be: all of
# them share one slot, and what is their own is computed anew in each turn. Neither --cache-ram nor
# --parallel helps; --slot-prompt-similarity 0.9 does, with a slot for each.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cat >ask.py <<'PYTHON'
import json
import urllib.request

import gguf
import numpy as np
import xllamacpp

WIDTH, HEADS, LAYERS, WORDS = 128, 4, 2, 260


def model():
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_context_length(4096)
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


def text(seed, length):
    return [int(word) for word in np.random.default_rng(seed).integers(3, 259, length)]


def computed(server, prompt):
    body = dict(prompt=prompt, temperature=0, n_predict=4, ignore_eos=True)
    address = server.listening_address + "/completion"
    with urllib.request.urlopen(address, json.dumps(body).encode()) as answer:
        return json.load(answer)["timings"]["prompt_n"]


model()
for slots, similarity, common in (
    (1, 0.1, 0),
    (1, 0.1, 240),
    (1, 0.1, 260),
    (4, 0.1, 260),
    (4, 0.1, 400),
    (4, 0.9, 400),
):
    params = xllamacpp.CommonParams()
    params.model.path = "model.gguf"
    params.n_ctx, params.n_parallel, params.port = 4096, slots, 0
    params.warmup = params.fit_params = False
    assert params.cache_ram_mib == 8192
    title = f"{slots} slot{'s' if slots > 1 else ''}"
    if similarity != round(params.slot_prompt_similarity, 3):
        params.slot_prompt_similarity = similarity
        title += f", similarity {similarity}"
    server = xllamacpp.Server(params)
    prompts = [[1] + text(9, common) + text(own, 500 - common) for own in (1, 2, 3)]
    print(f"{title}, {common} in common:", *(computed(server, prompt) for prompt in prompts * 2))
    del server
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
1 slot, 0 in common: 501 500 500 1 1 1
1 slot, 240 in common: 501 260 260 1 1 1
1 slot, 260 in common: 501 240 240 240 240 240
4 slots, 260 in common: 501 240 240 240 240 240
4 slots, 400 in common: 501 100 100 100 100 100
4 slots, similarity 0.9, 400 in common: 501 501 100 1 1 1
TEXT
diff expected seen && echo "as written above"
