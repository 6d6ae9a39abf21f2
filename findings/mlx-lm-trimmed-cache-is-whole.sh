#!/usr/bin/env bash
# mlx-lm: a prompt cache that was trimmed keeps what was cut off, in memory and in saved files.
#
# mlx-lm 0.32.2 with mlx 0.32.4 (CPU), Python 3.11. A cache of one layer with 32,768 tokens, and one
# for a prompt of 276 tokens that shares the first 256 of them; K and V of 2 heads of 64, bfloat16.
#
# Guess: trimming to 256 tokens frees the rest, at least when the cache is saved: the file of a
#        prompt has its own tokens. What a server finds by a common prefix costs what is common.
# Seen:  trimming sets a number. LRUPromptCache, which mlx-lm's server uses, answers with a copy of
#        the whole long cache; stored again for the short prompt it counts and takes as much as the
#        long one. save_prompt_cache writes all of it: of the file, 99 % are K and V of the other
#        prompt.
#
#            long: 32768 tokens, 16 MiB
#            found for the short one: 256 tokens of 276, 16 MiB
#            short one computed anew: 276 tokens, 256 KiB
#            both in LRUPromptCache: 32 MiB
#            saved: 16 MiB, computed anew and saved: 256 KiB
#            loaded: 276 tokens, and 32492 of the long prompt, unchanged
#
# For KV cache on disk: sizes follow the longest prompt that ever shared a prefix, and a file handed
# on for its short prompt has the long one's K and V, too. Cut them to `offset` first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
cat >ask.py <<'PYTHON'
import os

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache, load_prompt_cache, save_prompt_cache

mx.set_default_device(mx.cpu)


def compute(cache, tokens, seed=0):
    """Appends K and V of some tokens, as a model does."""
    mx.random.seed(seed)
    kv = mx.random.normal((1, 2, tokens, 64)).astype(mx.bfloat16)
    cache.update_and_fetch(kv, kv)
    return cache


def size(count):
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"


def saved(name, cache):
    save_prompt_cache(name, [cache])
    return size(os.path.getsize(name))


long = list(range(32768))
short = long[:256] + [99999] * 20
long_cache = compute(KVCache(), len(long))
print(f"long: {long_cache.offset} tokens, {size(long_cache.nbytes)}")
store = LRUPromptCache()
store.insert_cache("model", long, [long_cache])
(cache,), rest = store.fetch_nearest_cache("model", short)
print(f"found for the short one: {cache.offset} tokens of {len(short)}, {size(cache.nbytes)}")
compute(cache, len(rest), seed=1)
anew = compute(KVCache(), len(short))
print(f"short one computed anew: {anew.offset} tokens, {size(anew.nbytes)}")
store.insert_cache("model", short, [cache])
print(f"both in LRUPromptCache: {size(store.nbytes)}")
trimmed = saved("short.safetensors", cache)
print(f"saved: {trimmed}, computed anew and saved: {saved('anew.safetensors', anew)}")
(loaded,) = load_prompt_cache("short.safetensors")
end = loaded.offset
same = mx.array_equal(loaded.keys[..., end:, :], long_cache.keys[..., end:, :]).item()
more = loaded.keys.shape[2] - end
print(f"loaded: {end} tokens, and {more} of the long prompt, {'unchanged' if same else 'changed'}")
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
long: 32768 tokens, 16 MiB
found for the short one: 256 tokens of 276, 16 MiB
short one computed anew: 276 tokens, 256 KiB
both in LRUPromptCache: 32 MiB
saved: 16 MiB, computed anew and saved: 256 KiB
loaded: 276 tokens, and 32492 of the long prompt, unchanged
TEXT
diff expected seen && echo "as written above"
