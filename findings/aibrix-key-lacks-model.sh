#!/usr/bin/env bash
# AIBrix KVCache: names of stored blocks say nothing of the model, not even the type of its numbers.
#
# aibrix-kvcache 0.8.0 with PyTorch 1.13.1 of Debian 12, Python 3.11. Its file system backend
# (SHFS), default kind of key, default namespace; blocks of 16 tokens, 2 layers, 4 heads.
#
# Guess: the key, or the folder, has the model's name, or at least the type and all of the shape.
# Seen:  the folder has numbers of layers and heads, order and tokens of a block; the key is a hash
#        of the tokens. A block of 1.5s stored in bfloat16 is a hit for a float16 model and read as
#        1.9375. For heads of another size, too, the lookup finds it; only if the bytes of a block
#        differ, the load fails, after the lookup promised a hit.
#
#            stored in bfloat16: 2 blocks of 1.5, in aibrix_h0_3_l0_1_lcnd16roc
#            bfloat16: found 2, loaded 1.5
#            float16: found 2, loaded 1.9375
#            float32, heads half as large: found 2, loaded 1.50195
#            float16, heads twice as large: found 2, loaded nothing
#
# For a store that several models or versions use: AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE has to be
# set for each, also when weights are updated or fine-tuned, or one answers from the other's KV.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install cityhash==0.4.10 more-itertools==11.2.1 msgspec==0.23.0 numpy==1.26.4 \
    nvtx==0.2.17 redis==6.0.0 sortedcontainers==2.4.0 tqdm==4.70.1 uvloop==0.23.0 zstandard==0.25.0
venv/bin/pip -q install --no-deps aibrix-kvcache==0.8.0
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
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

os.environ["AIBRIX_KV_CACHE_OL_SHFS_ROOT"] = os.getcwd() + "/tier"
import torch
from aibrix_kvcache.cache_hashable import TokenListView
from aibrix_kvcache.l2 import KeyBuilder, L2Cache
from aibrix_kvcache.memory import MemoryRegion
from aibrix_kvcache.spec import KVCacheBlockLayout, KVCacheBlockSpec, KVCacheTensorSpec


class Region(MemoryRegion):
    def destroy_unsafe(self):
        pass


def open_cache(kind, head_size):
    shape = KVCacheTensorSpec(heads=[0, 1, 2, 3], layers=[0, 1], head_size=head_size)
    # A type of this PyTorch has no itemsize yet.
    sized = SimpleNamespace(itemsize=torch.zeros(1, dtype=kind).element_size())
    spec = KVCacheBlockSpec(16, sized, KVCacheBlockLayout.LCND, shape)
    keys = KeyBuilder.create("ROLLING_HASH", block_size=16)
    cache = L2Cache("SHFS", "SIMPLE", "aibrix", spec, ThreadPoolExecutor(1), key_builder=keys)
    assert cache.open().is_ok()
    size = cache.block_nbytes
    return cache, [Region(torch.zeros(size, dtype=torch.uint8), 0, size) for _ in range(2)]


async def main():
    tokens = TokenListView(list(range(32)))
    cache, blocks = open_cache(torch.bfloat16, 64)
    for block in blocks:
        block.slab.view(torch.bfloat16).fill_(1.5)
    count = (await cache.put(None, tokens, blocks)).get()
    print(f"stored in bfloat16: {count} blocks of 1.5, in", *os.listdir("tier"))
    for title, kind, head_size in (
        ("bfloat16", torch.bfloat16, 64),
        ("float16", torch.float16, 64),
        ("float32, heads half as large", torch.float32, 32),
        ("float16, heads twice as large", torch.float16, 128),
    ):
        cache, blocks = open_cache(kind, head_size)
        found = (await cache.exists(None, tokens)).get()
        loaded = (await cache.get(None, tokens, blocks)).is_ok()
        value = f"{float(blocks[0].slab.view(kind)[0]):.6g}" if loaded else "nothing"
        print(f"{title}: found {found}, loaded {value}")


asyncio.run(main())
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
stored in bfloat16: 2 blocks of 1.5, in aibrix_h0_3_l0_1_lcnd16roc
bfloat16: found 2, loaded 1.5
float16: found 2, loaded 1.9375
float32, heads half as large: found 2, loaded 1.50195
float16, heads twice as large: found 2, loaded nothing
TEXT
diff expected seen && echo "as written above"
