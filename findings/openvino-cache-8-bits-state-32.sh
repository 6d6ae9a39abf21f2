#!/usr/bin/env bash
# OpenVINO: the KV cache on CPUs has 8 bits by default, and its state, when it is saved, has 32.
#
# openvino 2026.4.1, numpy 2.4.6, Python 3.11, CPU. A model with states, made here: attention over K
# and V of 2 heads of 64 numbers that are appended to. 512 tokens of a normal distribution go in;
# shown are the states that come out, to one digit. INFERENCE_PRECISION_HINT is f32.
#
# Guess: the cache is in the type in which the model computes, if one does not ask for less. A state
#        is handed out as it is, so that saving and restoring it is exact and costs as much.
# Seen:  it is uint8, with a scale for each token of a head. With a channel of K that is 50 times as
#        large as the others, as models have them, the scale is that channel's, and the others are
#        off by 6 % of their deviation. A state is handed out in float32, so a saved prefix is four
#        times the cache; set again, it is quantised again, to slightly other numbers.
#
#            by default: u8, K off by 0.005, with a large channel by 0.06
#            by default: state float32, 524288 bytes for 131072 numbers, set again: not equal
#            f16: f16, K off by 0.0002, with a large channel by 0.0002
#            f16: state float32, 524288 bytes for 131072 numbers, set again: equal
#
# For whoever compares engines, or stores states of this one: KV_CACHE_PRECISION=f16 says what is
# meant. Stored states can be converted to 16 bits without loss then.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install openvino==2026.4.1 numpy==2.4.6
cat >ask.py <<'PYTHON'
import numpy as np
import openvino as ov
from openvino import opset13 as op

HEADS, WIDTH, TOKENS = 2, 64, 512
SHAPE = [-1, HEADS, -1, WIDTH]


def model():
    inputs = [op.parameter(SHAPE, np.float32, name=name) for name in ("q", "k", "v")]
    beam = op.parameter([-1], np.int32, name="beam")
    empty = op.constant(np.zeros((1, HEADS, 0, WIDTH), np.float32))
    grown, kept = [], []
    for name, new in zip("kv", inputs[1:]):
        past = op.read_value(empty, name, ov.Type.f32, ov.PartialShape(SHAPE))
        past = op.gather(past, beam, op.constant(np.int64(0)))
        grown.append(op.concat([past, new], -2))
        kept.append(op.assign(grown[-1], name))
    output = op.result(op.scaled_dot_product_attention(inputs[0], *grown))
    return ov.Model([output], kept, [*inputs, beam], "attention")


def states(request):
    return {state.name: state.state.data.copy() for state in request.query_state()}


def run(compiled, k, v):
    request = compiled.create_infer_request()
    request.infer({"q": k, "k": k, "v": v, "beam": np.zeros(1, np.int32)})
    return request, states(request)


random = np.random.default_rng(1)
k, v = (random.standard_normal((1, HEADS, TOKENS, WIDTH)).astype(np.float32) for _ in range(2))
large = k.copy()
large[..., 3] *= 50
for title, asked in (("by default", {}), ("f16", {"KV_CACHE_PRECISION": "f16"})):
    compiled = ov.Core().compile_model(model(), "CPU", {"INFERENCE_PRECISION_HINT": "f32", **asked})
    request, saved = run(compiled, k, v)
    off = np.sqrt(np.mean((saved["k"] - k) ** 2))
    with_large = np.delete(run(compiled, large, v)[1]["k"] - large, 3, -1)
    kind = compiled.get_property("KV_CACHE_PRECISION").to_string()
    drowned = np.sqrt(np.mean(with_large**2))
    print(f"{title}: {kind}, K off by {off:.1g}, with a large channel by {drowned:.1g}")
    again = compiled.create_infer_request()
    for state in again.query_state():
        state.state = ov.Tensor(saved[state.name])
    equal = all((states(again)[name] == saved[name]).all() for name in saved)
    size, count = sum(each.nbytes for each in saved.values()), 2 * k.size
    text = f"{size} bytes for {count} numbers, set again: {'equal' if equal else 'not equal'}"
    print(f"{title}: state {saved['k'].dtype}, {text}")
PYTHON
venv/bin/python ask.py 2>log | tee seen || { tail log; exit 1; }
cat >expected <<'TEXT'
by default: u8, K off by 0.005, with a large channel by 0.06
by default: state float32, 524288 bytes for 131072 numbers, set again: not equal
f16: f16, K off by 0.0002, with a large channel by 0.0002
f16: state float32, 524288 bytes for 131072 numbers, set again: equal
TEXT
diff expected seen && echo "as written above"
