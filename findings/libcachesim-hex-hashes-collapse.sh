#!/usr/bin/env bash
# libCacheSim (Python): block names that are hashes in hex are read as decimal numbers, silently.
#
# libcachesim 0.3.5, Python 3.11, Debian 12. 20,000 requests for 2,000 blocks of one size, each as
# likely as the others, by LRU with room for 200. The names are numbers, or their SHA-256 in hex.
#
# Guess: a name that is no number is hashed, or refused. LRU misses nine of ten requests either way.
# Seen:  neither, by default and without a word. Names are read as C reads numbers: up to the first
#        letter, so a hash that begins with one is block 0; octal after a 0; and with 0x in front,
#        all that is too large is the same number. With obj_id_is_num=False (and
#        obj_id_is_num_set=True) names are strings, and right.
#
#            numbers: 2000 blocks, LRU misses 90 %
#            SHA-256, by default: 519 blocks, LRU misses 19 %
#            0x and SHA-256, by default: 1 blocks, LRU misses 0 %
#            SHA-256, obj_id_is_num=False: 2000 blocks, LRU misses 90 %
#            the first four: 089e.. 620c.. 369b.. 8a9a.. are 0 620 369 8
#
# For traces of KV blocks, whose names are hashes: a cache of a tenth of the blocks seems to answer
# four of five requests, and answers one of ten.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install libcachesim==0.3.5
cat >ask.py <<'PYTHON'
from hashlib import sha256

import libcachesim

state, blocks = 1, []
for _ in range(20_000):
    state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
    blocks.append((state >> 33) % 2000)
hashes = [sha256(str(block).encode()).hexdigest() for block in blocks]


def trace(names, **options):
    with open("trace.csv", "w") as file:
        file.write("time,block,size\n")
        file.writelines(f"{time},{name},1\n" for time, name in enumerate(names))
    form = libcachesim.ReaderInitParam(has_header=True, has_header_set=True, **options)
    form.time_field, form.obj_id_field, form.obj_size_field = 1, 2, 3
    return libcachesim.TraceReader("trace.csv", libcachesim.TraceType.CSV_TRACE, form)


with open("seen", "w") as seen:
    for title, names, options in (
        ("numbers", blocks, {}),
        ("SHA-256, by default", hashes, {}),
        ("0x and SHA-256, by default", ["0x" + name for name in hashes], {}),
        ("SHA-256, obj_id_is_num=False", hashes, dict(obj_id_is_num=False, obj_id_is_num_set=True)),
    ):
        count = len({request.obj_id for request in trace(names, **options)})
        misses = libcachesim.LRU(200, hashpower=16).process_trace(trace(names, **options))[0]
        print(f"{title}: {count} blocks, LRU misses {100 * misses:.0f} %", file=seen)
    read = [str(request.obj_id) for request, _ in zip(trace(hashes), range(4))]
    print("the first four:", *(f"{name[:4]}.." for name in hashes[:4]), "are", *read, file=seen)
PYTHON
venv/bin/python ask.py >log 2>&1 || { cat log; exit 1; }
cat seen
cat >expected <<'TEXT'
numbers: 2000 blocks, LRU misses 90 %
SHA-256, by default: 519 blocks, LRU misses 19 %
0x and SHA-256, by default: 1 blocks, LRU misses 0 %
SHA-256, obj_id_is_num=False: 2000 blocks, LRU misses 90 %
the first four: 089e.. 620c.. 369b.. 8a9a.. are 0 620 369 8
TEXT
diff expected seen && echo "as written above"
