#!/usr/bin/env bash
# AIBrix KVCache: its default S3-FIFO never forgets an evicted block, nor that block's prompt.
#
# aibrix-kvcache 0.8.0 with PyTorch 1.13.1 of Debian 12, Python 3.11. 1,000 prompts of 1,024 tokens,
# in blocks of 16 tokens and 4 KiB, pass through the policies of its host memory; 640 blocks fit.
#
# Guess: the ghost queue of S3-FIFO has names without values, as many as the main queue has blocks
#        (448 here), as in the paper.
# Seen:  it is bounded by bytes, counts the bytes of values, and its entries have none: it is never
#        full. Each evicted block stays in the table, with its key, which refers to the tokens of
#        the whole prompt. LRU and FIFO keep the ten prompts that have blocks. And a block that was
#        ever seen goes straight to the main queue, past the small one that is to keep scans out.
#
#            LRU: blocks 640, entries 640, prompts in memory 10
#            FIFO: blocks 640, entries 640, prompts in memory 10
#            S3FIFO: blocks 640, entries 64000, prompts in memory 1000
#            S3FIFO, first block again, 63,999 blocks later: into the main queue
#
# For host memory above a KV store: it grows until the server is restarted, outside its capacity,
# and hit rates of a long run are not those of S3-FIFO, nor of a short run.
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
import weakref

import numpy as np
import torch
from aibrix_kvcache.cache_hashable import KVCacheKey, TokenListView
from aibrix_kvcache.l1.eviction_policy.base_eviction_policy import BaseEvictionPolicy
from aibrix_kvcache.memory import MemoryRegion

BYTES, TOKENS, PROMPT, ROOM = 4096, 16, 1024, 640
slab = torch.zeros(BYTES, dtype=torch.uint8)


class Region(MemoryRegion):
    def destroy_unsafe(self):
        pass


def keys(prompt):
    for start in range(0, PROMPT, TOKENS):
        yield KVCacheKey(prompt[:start] if start else None, prompt[start : start + TOKENS])


for name in ("LRU", "FIFO", "S3FIFO"):
    cache, prompts = BaseEvictionPolicy.create(name, ROOM * BYTES), []
    for number in range(1000):
        tokens = np.arange(PROMPT, dtype=np.int32) + PROMPT * number
        prompts.append(weakref.ref(tokens))
        for key in keys(TokenListView(tokens)):
            cache.put(key, Region(slab, 0, BYTES))
    del tokens, key
    alive = sum(prompt() is not None for prompt in prompts)
    counts = f"blocks {len(cache) // BYTES}, entries {len(cache._hashmap)}"
    print(f"{name}: {counts}, prompts in memory {alive}")
first = next(keys(TokenListView(np.arange(PROMPT, dtype=np.int32))))
cache.put(first, Region(slab, 0, BYTES))
queue = "main" if cache._hashmap[first].queue is cache._main_fifo else "small"
print(f"S3FIFO, first block again, 63,999 blocks later: into the {queue} queue")
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
LRU: blocks 640, entries 640, prompts in memory 10
FIFO: blocks 640, entries 640, prompts in memory 10
S3FIFO: blocks 640, entries 64000, prompts in memory 1000
S3FIFO, first block again, 63,999 blocks later: into the main queue
TEXT
diff expected seen && echo "as written above"
