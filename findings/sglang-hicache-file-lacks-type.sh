#!/usr/bin/env bash
# SGLang HiCache: a page in a file is read as whatever type is asked for; max_size is per rank.
#
# sglang 0.5.23 with PyTorch 1.13.1 of Debian 12, numpy 1.26.4, Python 3.11. HiCacheFile, the tier
# of files (--hicache-storage-backend file), as it is in the wheel, without the packages around it;
# pages of 32,768 numbers. One model, first with its cache in bfloat16, then in others; then four
# ranks with max_size 1 MiB that store 32 pages each. The numbers of 8 bits are uint8.
#
# Guess: the name of a file, or what is in it, says the type of the numbers: --kv-cache-dtype or
#        --dtype changed is a miss. max_size is what the folder may hold.
# Seen:  a name is the hash of the tokens, the model's name, and the rank. In the file are the bytes
#        alone, and a file that is too long is not refused: its first half is the page, if numbers
#        have half the bits. One that is too short raises an error after it was said to exist. Each
#        rank counts its own files, so the folder holds max_size times the ranks (and the models).
#
#            float16 after bfloat16: exists True, 1.5 is read as 1.9375
#            8 bits after bfloat16: exists True, 1.5 is read as 192
#            bfloat16 after 8 bits: exists True, Short read
#            4 ranks, max_size 1 MiB: more than 3 MiB in the folder
#
# For a folder that outlives the server: one for each type of cache and each version of the weights,
# or the other's KV is used without a word; and max_size is the drive's room by ranks and models.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install numpy==1.26.4 typing_extensions==4.16.0
venv/bin/pip -q install --no-deps sglang==0.5.23
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
import os
import pathlib
import sys
import types

import torch

# The tier alone: the packages around it are empty here, as theirs need an engine's.
root = pathlib.Path(next(path for path in sys.path if os.path.isdir(f"{path}/sglang")))
for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(root / name.replace(".", "/"))]
common = types.ModuleType("sglang.srt.utils.common")
common.human_readable_int = int
sys.modules["sglang.srt.utils"] = types.ModuleType("sglang.srt.utils")
sys.modules[common.__name__] = common
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig


def tier(rank=0, ranks=1, **extra):
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="maker/model",
        extra_config={"file_storage_path": "tier", **extra},
    )
    return HiCacheFile(config)


def page(kind, value=0.0):
    return torch.full((32 << 10,), value).to(kind)


def read(title, name, kind):
    try:
        text = f"1.5 is read as {tier().get(name, page(kind))[0].item():g}"
    except OSError as error:
        text = str(error).partition(" for ")[0]
    print(f"{title}: exists {tier().exists(name)}, {text}")


tier().set("tokens", page(torch.bfloat16, 1.5))
tier().set("others", page(torch.uint8, 1))
read("float16 after bfloat16", "tokens", torch.float16)
read("8 bits after bfloat16", "tokens", torch.uint8)
read("bfloat16 after 8 bits", "others", torch.bfloat16)
for rank in range(4):
    one = tier(rank, 4, max_size=1 << 20)
    for number in range(32):
        one.set(f"page{number}", page(torch.bfloat16))
held = sum(path.stat().st_size for path in pathlib.Path("tier").iterdir()) / (1 << 20)
print("4 ranks, max_size 1 MiB:", "more than 3" if held > 3 else held, "MiB in the folder")
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
float16 after bfloat16: exists True, 1.5 is read as 1.9375
8 bits after bfloat16: exists True, 1.5 is read as 192
bfloat16 after 8 bits: exists True, Short read
4 ranks, max_size 1 MiB: more than 3 MiB in the folder
TEXT
diff expected seen && echo "as written above"
