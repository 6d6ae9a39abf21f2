#!/usr/bin/env bash
# diskcache: one value too many, and ten are thrown away; of large values the cache holds none.
#
# diskcache 5.6.3, Python 3.11. 64 MiB of random values of one size are stored in a cache with
# size_limit=16 MiB, all else by default; shown is how many are in it, at least and at most, after
# each store of the second half.
#
# Guess: as many as there is room for, less one, whatever their size; in FanoutCache, which spreads
#        them over eight files for parallel use, too. What was used last stays.
# Seen:  a store that finds the cache too large throws up to ten values away (cull_limit), without
#        looking whether one is enough; the new one is among them if there are no others. Values
#        of a tenth of the limit empty the cache again and again. Each part of FanoutCache has an
#        eighth of the limit, so there it is values of an 80th. And those go first that were stored
#        first, used or not (least-recently-stored is the default).
#
#            Cache, 256 KiB: 54 to 63, room for 64
#            Cache, 1024 KiB: 6 to 15, room for 16
#            Cache, 2048 KiB: 0 to 7, room for 8
#            Cache, 4096 KiB: 0 to 3, room for 4
#            FanoutCache, 256 KiB: 0 to 56, room for 64
#            FanoutCache, 1024 KiB: 0 to 8, room for 16
#            FanoutCache, 2048 KiB: 0 to 0, room for 8
#            FanoutCache, 4096 KiB: 0 to 0, room for 4
#            one value asked for after each store: gone after 63 others
#
# For prefixes or KV states of many MiB: the limit has to be hundreds of values (for FanoutCache
# thousands), or cull_limit=1; and eviction_policy has to be "least-recently-used".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install diskcache==5.6.3
cat >ask.py <<'PYTHON'
import os
import shutil

from diskcache import Cache, FanoutCache

MIB = 1 << 20


def fill(kind, size):
    cache = kind("folder", size_limit=16 * MIB)
    held = []
    for number in range(64 * MIB // size):
        cache[number] = os.urandom(size)
        held.append(len(cache))
    last = held[len(held) // 2 :]
    room = 16 * MIB // size
    print(f"{kind.__name__}, {size >> 10} KiB: {min(last)} to {max(last)}, room for {room}")
    cache.close()
    shutil.rmtree("folder")


for kind in (Cache, FanoutCache):
    for kib in (256, 1024, 2048, 4096):
        fill(kind, kib << 10)
cache = Cache("folder", size_limit=16 * MIB)
cache["hot"] = os.urandom(MIB // 4)
others = 0
while cache.get("hot") and others < 200:
    cache[others] = os.urandom(MIB // 4)
    others += 1
print("one value asked for after each store: gone after", others, "others")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
Cache, 256 KiB: 54 to 63, room for 64
Cache, 1024 KiB: 6 to 15, room for 16
Cache, 2048 KiB: 0 to 7, room for 8
Cache, 4096 KiB: 0 to 3, room for 4
FanoutCache, 256 KiB: 0 to 56, room for 64
FanoutCache, 1024 KiB: 0 to 8, room for 16
FanoutCache, 2048 KiB: 0 to 0, room for 8
FanoutCache, 4096 KiB: 0 to 0, room for 4
one value asked for after each store: gone after 63 others
TEXT
diff expected seen && echo "as written above"
