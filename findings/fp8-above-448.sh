#!/usr/bin/env bash
# FP8 (E4M3): a key of 500 is NaN in some libraries, 448 in others, and MLX makes NaN a number.
#
# ml-dtypes 0.5.4, JAX 0.10.2, TensorStore 0.1.86, ONNX Runtime 1.32.0, MLX 0.32.4 (CPU), numpy
# 2.3.5, Python 3.11. Numbers of 32 bits to float8_e4m3fn, whose largest is 448, and back.
#
# Guess: one rule everywhere, that of the conversions in GPUs: what is larger becomes 448, and NaN
#        stays NaN. Or NaN for all that is larger, if one asks for no saturation.
# Seen:  three rules. ml-dtypes, JAX and TensorStore: NaN from 465 on, by rounding to the place
#        after 448, which is NaN. ONNX Runtime: 448, also for infinity (and so PyTorch 2.13 and
#        2.15, run by hand, as their wheels need CUDA; float8_e5m2 becomes infinite). MLX: 448, for
#        NaN, too. And ONNX Runtime with saturate=0 makes 448 of 480, and NaN of 479 and 500.
#
#            given: 448 464 465 479 480 500 inf nan
#            ml_dtypes: 448 448 nan nan nan nan nan nan
#            JAX: 448 448 nan nan nan nan nan nan
#            TensorStore: 448 448 nan nan nan nan nan nan
#            ONNX Runtime: 448 448 448 448 448 448 448 nan
#            ONNX Runtime, saturate=0: 448 448 nan nan 448 nan nan nan
#            MLX: 448 448 448 448 448 448 448 448
#
# For KV cache in FP8, which mostly has a scale of 1: whether a key that is too large is a bit
# wrong, or corrupts the whole request by NaN, depends on who converted it. numpy finds NaN in
# what an engine stored as 448; and a NaN of the model, through MLX, is a plausible number.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install jax==0.10.2 jaxlib==0.10.2 ml-dtypes==0.5.4 'mlx[cpu]==0.32.4' \
    numpy==2.3.5 onnx==1.23.2 onnxruntime==1.32.0 tensorstore==0.1.86
cat >ask.py <<'PYTHON'
import jax.numpy as jnp
import ml_dtypes
import mlx.core as mx
import numpy as np
import onnxruntime
import tensorstore
from onnx import TensorProto, helper

mx.set_default_device(mx.cpu)
VALUES = np.array([448, 464, 465, 479, 480, 500, np.inf, np.nan], np.float32)


def onnx(saturate):
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN, saturate=saturate)
    back = helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT)
    x, z = (helper.make_tensor_value_info(it, TensorProto.FLOAT, [None]) for it in "xz")
    graph = helper.make_graph([cast, back], "graph", [x], [z])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"x": VALUES})[0]


def show(title, values):
    print(f"{title}:", *(f"{float(value):g}" for value in np.asarray(values, np.float32)))


np.seterr(all="ignore")
show("given", VALUES)
show("ml_dtypes", VALUES.astype(ml_dtypes.float8_e4m3fn))
show("JAX", jnp.asarray(VALUES).astype(jnp.float8_e4m3fn))
cast = tensorstore.cast(tensorstore.array(VALUES), tensorstore.float8_e4m3fn)
show("TensorStore", cast.read().result())
show("ONNX Runtime", onnx(1))
show("ONNX Runtime, saturate=0", onnx(0))
show("MLX", mx.from_fp8(mx.to_fp8(mx.array(VALUES)), mx.float32))
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
given: 448 464 465 479 480 500 inf nan
ml_dtypes: 448 448 nan nan nan nan nan nan
JAX: 448 448 nan nan nan nan nan nan
TensorStore: 448 448 nan nan nan nan nan nan
ONNX Runtime: 448 448 448 448 448 448 448 nan
ONNX Runtime, saturate=0: 448 448 nan nan 448 nan nan nan
MLX: 448 448 448 448 448 448 448 448
TEXT
diff expected seen && echo "as written above"
