#!/usr/bin/env bash
# safetensors.numpy writes blocks in FP8 that it cannot read, and in bfloat16 that `load` cannot.
#
# safetensors 0.8.0, numpy 2.3.5, ml-dtypes 0.5.4, Python 3.11. Eight numbers of each type, written
# by save_file or save of safetensors.numpy, and read by its three ways to read.
#
# Guess: types of ml-dtypes are either refused when written, or read back as they were; from a file
#        and from bytes alike.
# Seen:  all are written without a word. Of FP8 nothing is read: the name of the type is looked for
#        in numpy itself, and `load` does not know it either. Of bfloat16, which load_file reads
#        right, `load` of the bytes that `save` made fails.
#
#            float16: load_file equal, safe_open equal, load equal
#            bfloat16: load_file equal, safe_open equal, load KeyError
#            float8_e4m3fn: load_file AttributeError, safe_open AttributeError, load KeyError
#            float8_e5m2: load_file AttributeError, safe_open AttributeError, load KeyError
#            float8_e8m0fnu: load_file AttributeError, safe_open AttributeError, load KeyError
#
# For KV cache that tools without PyTorch store: a test by save and load in float16 says nothing of
# FP8 caches. What reads them is a uint8 tensor, with the type in the metadata, and a view.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install ml-dtypes==0.5.4 numpy==2.3.5 safetensors==0.8.0
cat >ask.py <<'PYTHON'
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file


def open_file():
    with safe_open("file", "np") as file:
        return {"block": file.get_tensor("block")}


numbers = np.arange(8, dtype=np.float32)
types = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu]
for kind in [np.float16, ml_dtypes.bfloat16, *types]:
    block = numbers.astype(kind)
    save_file({"block": block}, "file")
    data = save({"block": block})
    told = []
    for title, read in (
        ("load_file", lambda: load_file("file")),
        ("safe_open", open_file),
        ("load", lambda: load(data)),
    ):
        try:
            back = read()["block"]
            is_equal = back.dtype == block.dtype and back.tobytes() == block.tobytes()
            told.append(f"{title} {'equal' if is_equal else 'other'}")
        except (AttributeError, KeyError) as error:
            told.append(f"{title} {type(error).__name__}")
    print(f"{block.dtype}: {', '.join(told)}")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
float16: load_file equal, safe_open equal, load equal
bfloat16: load_file equal, safe_open equal, load KeyError
float8_e4m3fn: load_file AttributeError, safe_open AttributeError, load KeyError
float8_e5m2: load_file AttributeError, safe_open AttributeError, load KeyError
float8_e8m0fnu: load_file AttributeError, safe_open AttributeError, load KeyError
TEXT
diff expected seen && echo "as written above"
