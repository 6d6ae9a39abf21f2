#!/usr/bin/env bash
# MLX: a block in FP8 is loaded as integers, 1.5 as 60; and files that MLX writes are not aligned.
#
# mlx 0.32.4 (CPU), safetensors 0.8.0, numpy 2.3.5, ml-dtypes 0.5.4, Python 3.11. Four numbers in
# float8_e4m3fn, written by safetensors and loaded by MLX, saved by MLX and loaded by safetensors;
# then where the first byte of bfloat16 tensors is in files of each, by the length of their name.
#
# Guess: FP8, a type of the format that MLX does not have, is refused, or converted to a type that
#        it has. Tensors begin at a multiple of 8 bytes, as the safetensors package pads for.
# Seen:  neither. The tensor arrives as uint8, with the bits as numbers, and nothing says so: what
#        computes with it computes. Saved again, it says U8 in the file, so that the type is lost
#        for all others, too. MLX pads nothing, so tensors of two bytes begin at odd places.
#
#            written 1.5 -2 0.25 448 as F8_E4M3
#            MLX has mlx.core.uint8: 60 192 40 126
#            MLX saved it as U8, safetensors has uint8: 60 192 40 126
#            mlx.core.from_fp8 of that: 1.5 -2 0.25 448
#            first byte by length of name, safetensors: 64 64 72 72 72 72 72 72
#            first byte by length of name, MLX: 83 84 85 86 87 88 89 90
#
# For KV cache in files: the type has to be kept beside the tensor. And what maps a file and takes a
# pointer to bfloat16 numbers into it, or has it read by O_DIRECT or GPUDirect, has to copy first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install 'mlx[cpu]==0.32.4' safetensors==0.8.0 numpy==2.3.5 ml-dtypes==0.5.4
cat >ask.py <<'PYTHON'
import json
import struct

import ml_dtypes
import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file, save_file

mx.set_default_device(mx.cpu)


def header(path):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        return 8 + size, json.loads(file.read(size))


def numbers(values):
    return " ".join(f"{float(value):g}" for value in values)


block = np.array([1.5, -2, 0.25, 448], ml_dtypes.float8_e4m3fn)
save_file({"k": block}, "block")
print("written", numbers(block), "as", header("block")[1]["k"]["dtype"])
loaded = mx.load("block", format="safetensors")["k"]
print(f"MLX has {loaded.dtype}: {numbers(loaded)}")
mx.save_safetensors("again.safetensors", {"k": loaded})
again, kind = load_file("again.safetensors")["k"], header("again.safetensors")[1]["k"]["dtype"]
print(f"MLX saved it as {kind}, safetensors has {again.dtype}: {numbers(again)}")
print("mlx.core.from_fp8 of that:", numbers(mx.from_fp8(loaded, mx.float32)))
names = ["k" * length for length in range(1, 9)]
half = np.zeros(4, ml_dtypes.bfloat16)
starts = {"safetensors": [], "MLX": []}
for name in names:
    save_file({name: half}, "one")
    mx.save_safetensors("other.safetensors", {name: mx.zeros(4, mx.bfloat16)})
    starts["safetensors"].append(header("one")[0])
    starts["MLX"].append(header("other.safetensors")[0])
for title, places in starts.items():
    print(f"first byte by length of name, {title}:", *places)
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
written 1.5 -2 0.25 448 as F8_E4M3
MLX has mlx.core.uint8: 60 192 40 126
MLX saved it as U8, safetensors has uint8: 60 192 40 126
mlx.core.from_fp8 of that: 1.5 -2 0.25 448
first byte by length of name, safetensors: 64 64 72 72 72 72 72 72
first byte by length of name, MLX: 83 84 85 86 87 88 89 90
TEXT
diff expected seen && echo "as written above"
