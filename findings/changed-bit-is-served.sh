#!/usr/bin/env bash
# One bit changed on disk: of seven formats that have checksums, six hand out the wrong block.
#
# plyvel 1.5.1 (LevelDB), rocksdict 0.3.29 (RocksDB), zarr 3.1.6, tensorstore 0.1.86, pyarrow
# 26.0.1, zstandard 0.25.0, lz4 4.4.5, numpy 2.3.5, Python 3.11, all by default or with the option
# shown. Blocks of 256 KiB of random bytes are stored; in the file one bit of the fourth is changed,
# found by its neighbours; then it is read.
#
# Guess: an error, from all of them: LevelDB has CRC32C for each piece of its files, as RocksDB has;
#        so have Zarr's shards and OCDBT; Parquet's pages have CRC32, frames of zstd and LZ4 XXH.
# Seen:  an error from RocksDB alone. LevelDB has checksums in the file and looks at them only for a
#        get that asks for it; paranoid_checks is not that. Zarr's shards and OCDBT have them for
#        indexes, not for data. Parquet writes none, and told to, it still reads without a look. The
#        packages for zstd and LZ4 leave out what the programs of these names put in.
#
#            LevelDB: wrong block
#            LevelDB, paranoid_checks: wrong block
#            LevelDB, get with verify_checksums: error
#            RocksDB: error
#            Zarr, shards: wrong block
#            TensorStore, OCDBT: wrong block
#            Parquet: wrong block
#            Parquet, write_page_checksum: wrong block
#            Parquet, and page_checksum_verification: error
#            zstandard: wrong block
#            zstandard, write_checksum: error
#            lz4.frame: wrong block
#            lz4.frame, content_checksum: error
#
# For KV blocks on SSDs: a wrong block is a wrong answer of the model for all who share the prefix,
# and that a format has checksums says nothing: change a bit, and look. (npz and DuckDB noticed,
# too; LMDB, SQLite, HDF5, Feather, and safetensors have none.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install plyvel==1.5.1 rocksdict==0.3.29 zarr==3.1.6 tensorstore==0.1.86 \
    pyarrow==26.0.1 zstandard==0.25.0 lz4==4.4.5 numpy==2.3.5
cat >ask.py <<'PYTHON'
from functools import partial
from pathlib import Path

import lz4.frame
import numpy as np
import plyvel
import pyarrow as pa
import pyarrow.parquet as parquet
import rocksdict
import tensorstore as ts
import zarr
import zstandard

SIZE = 262144
arrays = np.random.default_rng(1).integers(0, 256, (8, SIZE), dtype=np.uint8)
blocks = {str(number).encode(): array.tobytes() for number, array in enumerate(arrays)}
fourth = blocks[b"3"]


def ask(title, write, read):
    folder = Path(title)
    folder.mkdir()
    write(folder)
    assert read(folder) == fourth, title
    around = fourth[100_000:100_048]
    (path,) = [path for path in folder.rglob("*") if path.is_file() and around in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(around) + 20] ^= 8
    path.write_bytes(data)
    try:
        print(f"{title}: {'right' if read(folder) == fourth else 'wrong'} block", flush=True)
    except Exception:
        print(f"{title}: error", flush=True)


def level_db_write(folder):
    with plyvel.DB(str(folder), create_if_missing=True) as db:
        for key, block in blocks.items():
            db.put(key, block)
        db.compact_range()


def level_db(opened={}, got={}):
    def read(folder):
        with plyvel.DB(str(folder), **opened) as db:
            return db.get(b"3", **got)

    return level_db_write, read


def rocks_db(folder):
    return rocksdict.Rdict(str(folder))


def rocks_db_write(folder):
    db = rocks_db(folder)
    for key, block in blocks.items():
        db[key] = block
    db.close()


def zarr_write(folder):
    form = {"shape": (8, SIZE), "chunks": (1, SIZE), "shards": (8, SIZE), "dtype": "u1"}
    zarr.create_array(folder / "a", **form)[:] = arrays


def ocdbt(folder):
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder.resolve()}/"}).result()


def ocdbt_write(folder):
    for key, block in blocks.items():
        ocdbt(folder).write(key, block).result()


def table(written={}, opened={}):
    def write(folder):
        parquet.write_table(pa.table({"block": list(blocks.values())}), folder / "t", **written)

    return write, lambda folder: parquet.read_table(folder / "t", **opened)["block"][3].as_py()


def coder(encode, decode):
    return (
        lambda folder: (folder / "f").write_bytes(encode(fourth)),
        lambda folder: decode((folder / "f").read_bytes()),
    )


ask("LevelDB", *level_db())
ask("LevelDB, paranoid_checks", *level_db({"paranoid_checks": True}))
ask("LevelDB, get with verify_checksums", *level_db({}, {"verify_checksums": True}))
ask("RocksDB", rocks_db_write, lambda folder: rocks_db(folder)[b"3"])
ask("Zarr, shards", zarr_write, lambda folder: zarr.open_array(folder / "a")[3].tobytes())
ask("TensorStore, OCDBT", ocdbt_write, lambda folder: ocdbt(folder).read(b"3").result().value)
summed, verified = {"write_page_checksum": True}, {"page_checksum_verification": True}
ask("Parquet", *table())
ask("Parquet, write_page_checksum", *table(summed))
ask("Parquet, and page_checksum_verification", *table(summed, verified))
with_sums = zstandard.ZstdCompressor(write_checksum=True)
ask("zstandard", *coder(zstandard.compress, zstandard.decompress))
ask("zstandard, write_checksum", *coder(with_sums.compress, zstandard.decompress))
with_sums = partial(lz4.frame.compress, content_checksum=True)
ask("lz4.frame", *coder(lz4.frame.compress, lz4.frame.decompress))
ask("lz4.frame, content_checksum", *coder(with_sums, lz4.frame.decompress))
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
LevelDB: wrong block
LevelDB, paranoid_checks: wrong block
LevelDB, get with verify_checksums: error
RocksDB: error
Zarr, shards: wrong block
TensorStore, OCDBT: wrong block
Parquet: wrong block
Parquet, write_page_checksum: wrong block
Parquet, and page_checksum_verification: error
zstandard: wrong block
zstandard, write_checksum: error
lz4.frame: wrong block
lz4.frame, content_checksum: error
TEXT
diff expected seen && echo "as written above"
