#!/usr/bin/env bash
# MX scales (E8M0): with ml-dtypes and JAX half of all MXFP8 blocks get a NaN, and so do zeros.
#
# ml-dtypes 0.5.4, JAX 0.10.2, ONNX Runtime 1.32.0, onnx 1.23.2 (its reference), numpy 2.3.5, Python
# 3.11. Some numbers are converted to float8_e8m0fnu and back; then 2,000 blocks of 32 random
# numbers, of deviations from 1/16 to 16, to MXFP8: the scale is the largest number over 448
# (shares to the nearest 5 %).
#
# Guess: a scale has to be large enough, so it is rounded up, as ONNX has it by default, or GPUs do
#        it; at worst toward zero, which is the other way that they have. The scale of zeros, 0, is
#        the smallest that there is, 2^-127, so that they stay zeros; and infinity is NaN.
# Seen:  ml-dtypes and JAX round to the nearest: 1.25 is 1, and the largest numbers of a block, over
#        it, are more than 448, which both make NaN. 0 is NaN. ONNX Runtime is as guessed, but for
#        -1 and infinity, which it has numbers for; onnx's own reference makes 2^-126 of 2^-127.
#
#            given: 0 2^-127 1 1.25 1.5 3 -1 inf nan
#            ml-dtypes: nan 2^-127 1 1 2 4 nan nan nan
#            JAX, jit: nan 2^-127 1 1 2 4 nan nan nan
#            ONNX Runtime: 2^-127 2^-127 1 2 2 4 2^-127 2^127 nan
#            onnx's reference: 2^-127 2^-126 1 2 2 4 1 nan nan
#            blocks with NaN, scales as converted: ml-dtypes 55 %, JAX 55 %, ONNX Runtime 0 %
#            blocks with NaN, scales rounded up before: ml-dtypes 0 %, JAX 0 %, ONNX Runtime 0 %
#            a block of zeros: ml-dtypes nan, JAX nan, ONNX Runtime 0
#
# For KV blocks in MX formats: the exponent of a scale has to be chosen by hand, with a floor for
# zeros: what is behind the end of a prompt is zeros, and one NaN in V is NaN in each answer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install ml-dtypes==0.5.4 jax==0.10.2 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.3.5
cat >ask.py <<'PYTHON'
import math

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from ml_dtypes import float8_e4m3fn, float8_e8m0fnu
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def model(kind):
    there = helper.make_node("Cast", ["given"], ["small"], to=kind)
    back = helper.make_node("Cast", ["small"], ["seen"], to=TensorProto.FLOAT)
    ends = [helper.make_tensor_value_info(it, TensorProto.FLOAT, None) for it in ("given", "seen")]
    graph = helper.make_graph([there, back], "graph", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)


def by_onnx(kind):
    session = onnxruntime.InferenceSession(model(kind).SerializeToString())
    return lambda given: session.run(None, {"given": given})[0]


def by_jax(kind):
    convert = jax.jit(lambda given: given.astype(kind).astype(jnp.float32))
    return lambda given: np.array(convert(given))


# For each library what it makes of a scale and of a number.
libraries = {
    "ml-dtypes": [
        lambda given, kind=kind: given.astype(kind).astype(np.float32)
        for kind in (float8_e8m0fnu, float8_e4m3fn)
    ],
    "JAX": [by_jax(jnp.float8_e8m0fnu), by_jax(jnp.float8_e4m3fn)],
    "ONNX Runtime": [by_onnx(TensorProto.FLOAT8E8M0), by_onnx(TensorProto.FLOAT8E4M3FN)],
}


def text(number):
    if not 0 < number < math.inf or 1 <= number < 100:
        return f"{number:g}"
    return f"2^{math.log2(number):.0f}"


given = np.array([0, 2.0**-127, 1, 1.25, 1.5, 3, -1, np.inf, np.nan], np.float32)
print("given:", *map(text, given))
for title, (scale, _) in libraries.items():
    print(f"{title}{', jit' * (title == 'JAX')}:", *map(text, scale(given)))
reference = ReferenceEvaluator(model(TensorProto.FLOAT8E8M0))
print("onnx's reference:", *map(text, reference.run(None, {"given": given})[0]))

random = np.random.default_rng(1)
blocks = random.normal(size=(2000, 32)) * 2.0 ** random.uniform(-4, 4, size=(2000, 1))
blocks = blocks.astype(np.float32)


def restored(library, blocks, prepare):
    scale, number = libraries[library]
    scales = scale(prepare(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(448)))
    return number(blocks / scales) * scales


def rounded_up(scales):
    return np.exp2(np.ceil(np.log2(scales)))


np.seterr(all="ignore")
for title, prepare in (("as converted", np.array), ("rounded up before", rounded_up)):
    shares = []
    for library in libraries:
        has_nan = np.isnan(restored(library, blocks, prepare)).any(axis=1)
        shares.append(f"{library} {5 * round(20 * has_nan.mean())} %")
    print(f"blocks with NaN, scales {title}: {', '.join(shares)}")
zeros = np.zeros((1, 32), np.float32)
seen = [f"{library} {restored(library, zeros, np.array).max():g}" for library in libraries]
print("a block of zeros:", ", ".join(seen))
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
given: 0 2^-127 1 1.25 1.5 3 -1 inf nan
ml-dtypes: nan 2^-127 1 1 2 4 nan nan nan
JAX, jit: nan 2^-127 1 1 2 4 nan nan nan
ONNX Runtime: 2^-127 2^-127 1 2 2 4 2^-127 2^127 nan
onnx's reference: 2^-127 2^-126 1 2 2 4 1 nan nan
blocks with NaN, scales as converted: ml-dtypes 55 %, JAX 55 %, ONNX Runtime 0 %
blocks with NaN, scales rounded up before: ml-dtypes 0 %, JAX 0 %, ONNX Runtime 0 %
a block of zeros: ml-dtypes nan, JAX nan, ONNX Runtime 0
TEXT
diff expected seen && echo "as written above"
