#!/usr/bin/env bash
# pyarrow: blocks in Arrow files begin at multiples of 8, at another one for each number of rows.
#
# pyarrow 26.0.1, polars 2.1.0, Python 3.11. Tables of 1, 2, 3, 4, and 8 blocks of 64 KiB, without
# and with a key of 64 bits, written as Arrow files (IPC), without compression; shown is the place
# of the first block in the file, modulo 64.
#
# Guess: a multiple of 64, as the format recommends, and as all memory of the library is; so that a
#        file that is mapped is as good as memory.
# Seen:  columns are padded to 8 bytes. Keys and offsets lie before the blocks and move them, by 8
#        bytes a row; names and types do, too, as they are in the header. In Python nothing sets
#        it (C++ has IpcWriteOptions::alignment), and a reader maps the file without a word. polars
#        pads to 64, but from the end of a header that it pads to 8.
#
#            pyarrow, blocks: 48 56 0 8 40
#            pyarrow, keys and blocks: 32 48 0 16 16
#            polars, blocks: 40 40 40 40 40
#            polars, keys and blocks: 16 16 16 16 16
#
# For KV blocks in Arrow files: what maps one and hands it to a kernel that loads 16 bytes a thread,
# or reads it by O_DIRECT or GPUDirect (512 or 4,096), has to copy first, or pad the file itself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install pyarrow==26.0.1 polars==2.1.0
cat >ask.py <<'PYTHON'
import polars as pl
import pyarrow as pa

SIZE = 64 << 10


def place(path):
    source = pa.memory_map(path)
    begin = source.read_buffer().address
    source.seek(0)
    column = pa.ipc.open_file(source).read_all()["block"]
    return (column.chunk(0).buffers()[-1].address - begin) % 64


def table(rows, keys):
    columns = {"block": pa.array([bytes(SIZE)] * rows, pa.large_binary())}
    if keys:
        columns = {"key": pa.array(range(rows), pa.uint64()), **columns}
    return pa.table(columns)


def write(rows, keys, library):
    content = table(rows, keys)
    if library == "polars":
        pl.from_arrow(content).write_ipc("file")
        return place("file")
    with pa.OSFile("file", "wb") as file, pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content)
    return place("file")


for library in ("pyarrow", "polars"):
    for keys in (False, True):
        title = "keys and blocks" if keys else "blocks"
        places = (write(rows, keys, library) for rows in (1, 2, 3, 4, 8))
        print(f"{library}, {title}:", *places)
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
pyarrow, blocks: 48 56 0 8 40
pyarrow, keys and blocks: 32 48 0 16 16
polars, blocks: 40 40 40 40 40
polars, keys and blocks: 16 16 16 16 16
TEXT
diff expected seen && echo "as written above"
