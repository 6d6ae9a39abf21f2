#!/usr/bin/env bash
# OpenDAL: readers see a block while it is written, and its first bytes replace the old one.
#
# opendal 0.47.12 and obstore 0.12.1 (Apache's object_store), Python 3.11, both on a folder. A block
# of 3,000 bytes is replaced by one of 16 MiB, in two writes; shown is what a second operator for
# the folder reads meanwhile.
#
# Guess: an object store, whatever is below it: an object is the old one until the new one is
#        finished, and a writer that ends before that leaves the old one.
# Seen:  so it is with obstore, by another name and a rename. OpenDAL, at the first write, cuts the
#        file itself to nothing. Readers get a part, without an error, and if the writer is gone
#        before the end, that is the block for ever: it exists, and its size is what is there. With
#        atomic_write_dir, which is not set by default, it is as guessed.
#
#            obstore: before 3000, opened 3000, half 3000, left 3000
#            opendal: before 3000, opened 3000, half 1 to 16 MiB, left 1 to 16 MiB
#            opendal, atomic_write_dir: before 3000, opened 3000, half 3000, left 3000
#
# For a KV tier on files, shared or not: "it exists" is no hit. Set atomic_write_dir to a folder of
# the same file system, or keep length and checksum with the name.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install opendal==0.47.12 obstore==0.12.1
cat >ask.py <<'PYTHON'
import os
import sys

import obstore
import opendal
from obstore.store import LocalStore

MIB = 1 << 20


def use(kind):
    """The calls that put a block, open one for writing, and read one."""
    os.makedirs("folder", exist_ok=True)
    os.makedirs("parts", exist_ok=True)
    if kind == "obstore":
        store = LocalStore("folder")
        return (
            lambda data: obstore.put(store, "block", data),
            lambda: obstore.open_writer(store, "block", buffer_size=MIB),
            lambda: bytes(obstore.get(store, "block").bytes()),
        )
    options = {"atomic_write_dir": "parts"} if "atomic" in kind else {}
    store = opendal.Operator("fs", root="folder", **options)
    return (
        lambda data: store.write("block", data),
        lambda: store.open("block", "wb"),
        lambda: bytes(store.read("block")),
    )


def size(data):
    return "1 to 16 MiB" if MIB <= len(data) < 16 * MIB else len(data)


kind = sys.argv[1]
put, open_writer, _ = use(kind)
_, _, read = use(kind)
put(b"old" * 1000)
seen = [("before", size(read()))]
writer = open_writer()
seen.append(("opened", size(read())))
writer.write(b"n" * 8 * MIB)
seen.append(("half", size(read())))
print(f"{kind}:", ", ".join(f"{when} {what}" for when, what in seen), end="", flush=True)
os._exit(0)  # The writer's process ends here.
PYTHON
cat >left.py <<'PYTHON'
import os

size = os.path.getsize("folder/block")
print(", left", "1 to 16 MiB" if 1 << 20 <= size < 1 << 24 else size)
PYTHON
for kind in obstore opendal 'opendal, atomic_write_dir'; do
    rm -rf folder parts
    venv/bin/python ask.py "$kind"
    venv/bin/python left.py
done | tee seen
cat >expected <<'TEXT'
obstore: before 3000, opened 3000, half 3000, left 3000
opendal: before 3000, opened 3000, half 1 to 16 MiB, left 1 to 16 MiB
opendal, atomic_write_dir: before 3000, opened 3000, half 3000, left 3000
TEXT
diff expected seen && echo "as written above"
