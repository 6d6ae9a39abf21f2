#!/usr/bin/env bash
# safetensors: tensors that load_file returned change when the file is written again in place.
#
# safetensors 0.8.0 with PyTorch 1.13.1 of Debian 12, numpy 1.26.4, Python 3.11, CPU. A file of 12
# tensors of 512 KiB is loaded, and before they are used, the same tensors with other values are
# written to the same path: once by opening it again, once under another name and by a rename.
#
# Guess: load_file reads the file and returns tensors of its own; what happens to the file later, no
#        tensor sees. In the file, tensors are in the order of the dictionary.
# Seen:  for PyTorch the tensors are a private mapping of the file: nothing is read until a page is
#        first used, and then it is the file of that moment. So do safe_open's tensors and slices,
#        also after it is closed. numpy's load_file does read. Pages that the tensor's owner wrote
#        are its own. In the file, names are in the order of strings: layer 10 is before layer 2.
#
#            load_file, written in place: 1 became 2
#            safe_open, after its end, written in place: 1 became 2
#            a page that was written before: stays 1
#            load_file, renamed: stays 1
#            numpy's load_file, written in place: stays 1
#            MiB in memory after load_file: 0 of 6
#            layers in the file: 0 1 10 11 2 3 4 5 6 7 8 9
#
# For KV cache in such files: a cache that writes a block again in place changes what another engine
# holds; write a new file and rename it. A time of load_file has no I/O in it: that comes with the
# first use, by page faults, and a tier seems infinitely fast.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install numpy==1.26.4 safetensors==0.8.0
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall python3-torch \
    2>/dev/null | awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
rm ./*.deb
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$work/system/lib/x86_64-linux-gnu:$work/system/usr/lib
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$libraries/blas:$libraries/lapack
echo "$work/system/usr/lib/python3/dist-packages" >venv/lib/python3.11/site-packages/torch.pth
cat >ask.py <<'PYTHON'
import json
import os

import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save, save_file

NAMES = [f"layer {number}" for number in range(12)]


def tensors(value):
    return {name: torch.full((1 << 17,), float(value)) for name in NAMES}


def write_in_place(value):
    with open("file", "r+b") as file:
        file.write(save(tensors(value)))


def tell(title, tensor, at=-1):
    value = int(tensor[at])
    print(f"{title}:", "stays 1" if value == 1 else f"1 became {value}")


save_file(tensors(1), "file")
loaded = load_file("file")
loaded["layer 1"][:1024] = 1.0
with safe_open("file", "pt") as file:
    opened = file.get_tensor("layer 2")
arrays = load_arrays("file")
write_in_place(2)
tell("load_file, written in place", loaded["layer 3"])
tell("safe_open, after its end, written in place", opened)
tell("a page that was written before", loaded["layer 1"], 0)

save_file(tensors(1), "file")
loaded = load_file("file")
save_file(tensors(2), "new")
os.rename("new", "file")
tell("load_file, renamed", loaded["layer 3"])
tell("numpy's load_file, written in place", arrays["layer 3"])


def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "RssFile" in line)


before = resident()
loaded = load_file("file")
print(f"MiB in memory after load_file: {(resident() - before) >> 10} of 6")
with open("file", "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
places = sorted(NAMES, key=lambda name: header[name]["data_offsets"])
print("layers in the file:", *(name.split()[1] for name in places))
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
load_file, written in place: 1 became 2
safe_open, after its end, written in place: 1 became 2
a page that was written before: stays 1
load_file, renamed: stays 1
numpy's load_file, written in place: stays 1
MiB in memory after load_file: 0 of 6
layers in the file: 0 1 10 11 2 3 4 5 6 7 8 9
TEXT
diff expected seen && echo "as written above"
