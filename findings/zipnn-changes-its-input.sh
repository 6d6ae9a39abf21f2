#!/usr/bin/env bash
# ZipNN: compressing a block changes the block itself, in place, also one of type `bytes`.
#
# zipnn 0.5.4, numpy 2.3.5, ml-dtypes 0.5.4, Python 3.11. A block of 262,144 random numbers of a
# normal distribution; what is compared is the block before and after a call of `compress`.
#
# Guess: lossless, 66 % for bfloat16 (the entropy of its exponents), and the input is only read, as
#        by every other compressor; that of type `bytes` cannot change at all.
# Seen:  what is decompressed is right, and the size is as guessed. But the sign is moved behind
#        the fraction in the caller's memory and stays there, so every number is another one. With
#        bfloat16, the default, and float32; not with float16. reorder_signbit=255, documented as
#        "no", does not prevent it, and nothing says so. A second call compresses the changed block.
#
#            bfloat16, bytes: 66 %, decompressed right, block changed
#            bfloat16, bytearray: 66 %, decompressed right, block changed
#            bfloat16, memoryview of an array: 66 %, decompressed right, block changed
#            bfloat16, reorder_signbit=255: 66 %, decompressed right, block changed
#            float32, bytes: 83 %, decompressed right, block changed
#            float16, bytes: 85 %, decompressed right, block as it was
#            once more, bfloat16: decompressed wrong
#            the first numbers: 0.346 0.82 0.33 -1.3
#            afterwards: -2.3e+35 -4.36e+36 -2.19e+35 -2.22e+38
#
# For KV cache: whoever compresses a block that the engine still has, or a buffer that is verified,
# stored a second time or sent to a second tier afterwards, must compress a copy.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install numpy==2.3.5 ml-dtypes==0.5.4 safetensors==0.8.0
venv/bin/pip -q install --no-deps zipnn==0.5.4
# Of PyTorch, only the names of types are used here.
cat >torch.py <<'PYTHON'
class nn:
    Module = object


class jit:
    script = staticmethod(lambda function: function)


def __getattr__(name):
    return type(name, (), {})
PYTHON
cat >ask.py <<'PYTHON'
import ml_dtypes
import numpy as np
from zipnn import ZipNN

numbers = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
kinds = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
for kind, title, make, options in (
    ("bfloat16", "bytes", bytes, {}),
    ("bfloat16", "bytearray", bytearray, {}),
    ("bfloat16", "memoryview of an array", lambda data: memoryview(np.array(data)), {}),
    ("bfloat16", "reorder_signbit=255", bytes, {"reorder_signbit": 255}),
    ("float32", "bytes", bytes, {}),
    ("float16", "bytes", bytes, {}),
):
    before = numbers.astype(kinds[kind]).view(np.uint8)
    block = make(before)
    packed = ZipNN(bytearray_dtype=kind, **options).compress(block)
    back = ZipNN(bytearray_dtype=kind, **options).decompress(packed)
    is_right = "right" if bytes(back) == before.tobytes() else "wrong"
    is_kept = "as it was" if bytes(block) == before.tobytes() else "changed"
    size = f"{100 * len(packed) / len(before):.0f} %"
    print(f"{kind}, {title}: {size}, decompressed {is_right}, block {is_kept}")

before = numbers.astype(ml_dtypes.bfloat16).tobytes()
block = bytes(bytearray(before))
ZipNN().compress(block)
back = ZipNN().decompress(ZipNN().compress(block))
print("once more, bfloat16: decompressed", "right" if bytes(back) == before else "wrong")
for title, data in ("the first numbers:", before), ("afterwards:", block):
    first = np.frombuffer(data, ml_dtypes.bfloat16)[:4].astype(float)
    print(title, *(f"{number:.3g}" for number in first))
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
bfloat16, bytes: 66 %, decompressed right, block changed
bfloat16, bytearray: 66 %, decompressed right, block changed
bfloat16, memoryview of an array: 66 %, decompressed right, block changed
bfloat16, reorder_signbit=255: 66 %, decompressed right, block changed
float32, bytes: 83 %, decompressed right, block changed
float16, bytes: 85 %, decompressed right, block as it was
once more, bfloat16: decompressed wrong
the first numbers: 0.346 0.82 0.33 -1.3
afterwards: -2.3e+35 -4.36e+36 -2.19e+35 -2.22e+38
TEXT
diff expected seen && echo "as written above"
