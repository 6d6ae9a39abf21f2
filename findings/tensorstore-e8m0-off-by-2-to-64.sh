#!/usr/bin/env bash
# TensorStore: a scale of 1 in E8M0 is read as 2^64, one of 2 as minus 2^65, and written as 2^-64.
#
# tensorstore 0.1.86, numpy 2.3.5, ml-dtypes 0.5.4, Python 3.11. Powers of two are converted from
# float32 to each of TensorStore's types of 4 and 8 bits and back, in memory and through an array in
# a file (Zarr 3), by TensorStore and by ml-dtypes, whose types it uses.
#
# Guess: float8_e8m0fnu, the scale of blocks in MXFP4 and MXFP8, is one byte n for 2^(n - 127), as
#        the format says and as in ml-dtypes. Conversions of both give the same bytes.
# Seen:  so it is for all other types. This one is converted as if it had a sign bit and seven bits
#        of exponent, both ways: what TensorStore makes from 1 is the byte 63, for all others 2^-64,
#        and of a byte 127, which is 1, it makes 2^64; from byte 128 on, numbers are negative. There
#        and back by TensorStore alone all is well, and nothing is said.
#
#            float8_e8m0fnu: 1 2 4 8 become bytes 63 64 65 66, in ml-dtypes 127 128 129 130
#            float8_e8m0fnu: these bytes of ml-dtypes are 2^64 -2^65 -2^66 -2^67
#            float8_e8m0fnu: there and back 1 2 4 8
#            float8_e4m3fn, float8_e5m2, float8_e3m4: same bytes, same numbers
#            float8_e4m3fnuz, float8_e5m2fnuz, float4_e2m1fn: same bytes, same numbers
#            stored by ml-dtypes, read as it is: 1 2 4 8
#            stored by ml-dtypes, read as float32: 2^64 -2^65 -2^66 -2^67
#
# For KV blocks in MX formats: read scales as they are, and convert them with ml-dtypes. What was
# written through ts.cast has other scales for whoever reads it with something else.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install tensorstore==0.1.86 numpy==2.3.5 ml-dtypes==0.5.4
cat >ask.py <<'PYTHON'
import math

import numpy as np
import tensorstore as ts

numbers = np.array([1, 2, 4, 8], np.float32)


def powers(numbers):
    def power(number):
        sign, exponent = "-" if number < 0 else "", math.log2(abs(number))
        return f"{number:.0f}" if exponent < 8 else f"{sign}2^{exponent:.0f}"

    return " ".join(power(float(number)) for number in numbers)


def bytes_of(array):
    return " ".join(str(byte) for byte in array.view(np.uint8))


def converted(array, kind):
    return ts.cast(ts.array(array), kind).read().result()


scale = ts.dtype("float8_e8m0fnu")
ours, theirs = converted(numbers, scale), numbers.astype(scale.numpy_dtype)
print(f"float8_e8m0fnu: 1 2 4 8 become bytes {bytes_of(ours)}, in ml-dtypes {bytes_of(theirs)}")
print("float8_e8m0fnu: these bytes of ml-dtypes are", powers(converted(theirs, ts.float32)))
print("float8_e8m0fnu: there and back", powers(converted(ours, ts.float32)))
for names in (
    ("float8_e4m3fn", "float8_e5m2", "float8_e3m4"),
    ("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn"),
):
    is_same = {"bytes": True, "numbers": True}
    for name in names:
        # 4 and 8 are the largest numbers that all of these types have, or nearly.
        kind, some = ts.dtype(name), numbers[:3]
        theirs = some.astype(kind.numpy_dtype)
        is_same["bytes"] &= bytes_of(converted(some, kind)) == bytes_of(theirs)
        is_same["numbers"] &= bool((converted(theirs, ts.float32) == some).all())
    is_same = [f"{'same' if same else 'other'} {what}" for what, same in is_same.items()]
    print(f"{', '.join(names)}: {', '.join(is_same)}")
metadata = {"data_type": "float8_e8m0fnu", "shape": [4]}
where = {"driver": "file", "path": "scales/"}
spec = {"driver": "zarr3", "kvstore": where, "metadata": metadata}
store = ts.open(spec, create=True).result()
store[:] = numbers.astype(scale.numpy_dtype)
print("stored by ml-dtypes, read as it is:", powers(store.read().result().astype(np.float32)))
print("stored by ml-dtypes, read as float32:", powers(ts.cast(store, ts.float32).read().result()))
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
float8_e8m0fnu: 1 2 4 8 become bytes 63 64 65 66, in ml-dtypes 127 128 129 130
float8_e8m0fnu: these bytes of ml-dtypes are 2^64 -2^65 -2^66 -2^67
float8_e8m0fnu: there and back 1 2 4 8
float8_e4m3fn, float8_e5m2, float8_e3m4: same bytes, same numbers
float8_e4m3fnuz, float8_e5m2fnuz, float4_e2m1fn: same bytes, same numbers
stored by ml-dtypes, read as it is: 1 2 4 8
stored by ml-dtypes, read as float32: 2^64 -2^65 -2^66 -2^67
TEXT
diff expected seen && echo "as written above"
