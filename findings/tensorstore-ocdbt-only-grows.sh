#!/usr/bin/env bash
# TensorStore: an OCDBT database only grows, also if all of it is deleted; four bits take eight.
#
# tensorstore 0.1.86, numpy 2.3.5, ml-dtypes 0.5.4, Python 3.11. Ten keys of 1 MiB of random bytes
# in a directory, written five times over, deleted, opened again, and written once more. Then arrays
# of 1,048,576 numbers in Zarr 3, as they are, without compression.
#
# Guess: like other databases whose files are never changed, it drops in time, or when it is opened,
#        what no version needs. Numbers of 4 bits lie two to a byte.
# Seen:  neither. Each write adds to the files, and none is ever removed; the package has no call
#        for that. A number of 4 bits has a byte, as in numpy.
#
#            written: 10 keys, 10 MiB on disk
#            written four times more: 10 keys, 50 MiB on disk
#            all deleted: 0 keys, 50 MiB on disk
#            opened again: 0 keys, 50 MiB on disk
#            written once more: 10 keys, 60 MiB on disk
#            1,048,576 numbers of bfloat16: 2048 KiB
#            1,048,576 numbers of float8_e4m3fn: 1024 KiB
#            1,048,576 numbers of float4_e2m1fn: 1024 KiB
#            1,048,576 numbers of int4: 1024 KiB
#
# For KV blocks in OCDBT, which is made for checkpoints: as a cache that evicts, it fills the drive
# with what it has evicted. And a block quantised to 4 bits is as large as one in FP8, unless it is
# packed to bytes before.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install tensorstore==0.1.86 numpy==2.3.5 ml-dtypes==0.5.4
cat >ask.py <<'PYTHON'
import os

import tensorstore

MIB = 1 << 20
FILE = {"driver": "file", "path": os.getcwd() + "/store/"}


def size(folder):
    paths = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    return sum(map(os.path.getsize, paths))


def show(title):
    print(f"{title}: {len(store.list().result())} keys, {size('store') / MIB:.0f} MiB on disk")


def write():
    for number in range(10):
        store.write(f"block {number}", os.urandom(MIB)).result()


store = tensorstore.KvStore.open({"driver": "ocdbt", "base": FILE}).result()
write()
show("written")
for _ in range(4):
    write()
show("written four times more")
store.delete_range(tensorstore.KvStore.KeyRange()).result()
show("all deleted")
store = tensorstore.KvStore.open({"driver": "ocdbt", "base": FILE}).result()
show("opened again")
write()
show("written once more")
for kind in ("bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int4"):
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": kind}}
    spec["metadata"] = {"codecs": codecs}
    array = tensorstore.open(spec, create=True, dtype=getattr(tensorstore, kind), shape=[MIB])
    array.result()[...] = 1
    print(f"1,048,576 numbers of {kind}: {size(kind + '/c') // 1024} KiB")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
written: 10 keys, 10 MiB on disk
written four times more: 10 keys, 50 MiB on disk
all deleted: 0 keys, 50 MiB on disk
opened again: 0 keys, 50 MiB on disk
written once more: 10 keys, 60 MiB on disk
1,048,576 numbers of bfloat16: 2048 KiB
1,048,576 numbers of float8_e4m3fn: 1024 KiB
1,048,576 numbers of float4_e2m1fn: 1024 KiB
1,048,576 numbers of int4: 1024 KiB
TEXT
diff expected seen && echo "as written above"
