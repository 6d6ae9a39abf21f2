#!/usr/bin/env bash
# pandas, pyarrow, polars: times of a trace's ninth hour are dates in 1971, hashes of it are reals.
#
# pandas 3.1.1, pyarrow 26.0.1, polars 2.1.0, duckdb 2.0.1, Python 3.11. A trace as Mooncake's, 100
# requests, one a second, times in ms from 0 or from 9 hours on; IDs of blocks are random numbers
# of 63 or of 64 bits. Each library reads it by its reader of JSON lines, by default.
#
# Guess: `timestamp` is the number in the file. IDs of 64 bits are unsigned numbers of 64 bits.
# Seen:  both depend on values. If all times of a file are larger than 31,536,000, pandas takes them
#        for seconds since 1970: the first 8.76 hours of a trace are numbers, and a part that begins
#        later is dates, 1,000 times as far apart. With IDs of 2^63 and more, pyarrow makes all IDs
#        of the file floating point numbers, and polars makes them strings, without a word.
#
#            hour 0, pandas: first 0, gap 1000
#            hour 9, pandas: first 1971-01-11 00:00:00, gap 0 days 00:16:40
#            hour 9, pyarrow: first 32400000, gap 1000
#            hour 9, polars: first 32400000, gap 1000
#            hour 9, duckdb: first 32400000, gap 1000
#            64 bits, pandas: int, 200 of 200 as written
#            64 bits, pandas, engine='pyarrow': float, 1 of 200 as written
#            64 bits, pyarrow: float, 1 of 200 as written
#            64 bits, polars: str, 0 of 200 as written
#            64 bits, duckdb: int, 200 of 200 as written
#        (and so on: hour 0 and 63 bits are right with all)
#
# For traces of KV blocks, cut into parts and read one by one: rates differ by 1,000 between parts;
# the same block has other names in two parts, and joins and counts of hits find nothing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install duckdb==2.0.1 pandas==3.1.1 polars==2.1.0 pyarrow==26.0.1
cat >ask.py <<'PYTHON'
import json
import random

import duckdb
import pandas
import polars
import pyarrow.json

numbers = random.Random(1)
HASHES = [numbers.getrandbits(64) for _ in range(200)]


def write(path, start, shift):
    """A trace: a request a second, of two blocks; all IDs with a bit less if `shift` is 1."""
    with open(path, "w") as file:
        for second in range(100):
            ids = [identity >> shift for identity in HASHES[2 * second : 2 * second + 2]]
            request = {"timestamp": start + 1000 * second, "input_length": 1024, "hash_ids": ids}
            file.write(json.dumps(request) + "\n")


def with_pandas(path, **options):
    frame = pandas.read_json(path, lines=True, **options)
    return frame["timestamp"].tolist(), frame["hash_ids"].tolist()


def with_polars(path):
    frame = polars.read_ndjson(path)
    return frame["timestamp"].to_list(), frame["hash_ids"].to_list()


def with_pyarrow(path):
    table = pyarrow.json.read_json(path).to_pydict()
    return table["timestamp"], table["hash_ids"]


def with_duckdb(path):
    rows = duckdb.sql(f"SELECT timestamp, hash_ids FROM read_json('{path}')").fetchall()
    return list(zip(*rows))


readers = {
    "pandas": with_pandas,
    "pandas, engine='pyarrow'": lambda path: with_pandas(path, engine="pyarrow"),
    "pyarrow": with_pyarrow,
    "polars": with_polars,
    "duckdb": with_duckdb,
}
for hour in (0, 9):
    write("trace.jsonl", hour * 3_600_000, 1)
    for name, read in readers.items():
        first, second, *_ = read("trace.jsonl")[0]
        print(f"hour {hour}, {name}: first {first}, gap {second - first}")
for bits, shift in ((63, 1), (64, 0)):
    write("trace.jsonl", 0, shift)
    for name, read in readers.items():
        _, blocks = read("trace.jsonl")
        found = [identity for request in blocks for identity in request]
        kind = type(found[0]).__name__.rstrip("0123456789")
        equal = 0 if kind == "str" else sum(int(a) == b >> shift for a, b in zip(found, HASHES))
        print(f"{bits} bits, {name}: {kind}, {equal} of 200 as written")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
hour 0, pandas: first 0, gap 1000
hour 0, pandas, engine='pyarrow': first 0, gap 1000
hour 0, pyarrow: first 0, gap 1000
hour 0, polars: first 0, gap 1000
hour 0, duckdb: first 0, gap 1000
hour 9, pandas: first 1971-01-11 00:00:00, gap 0 days 00:16:40
hour 9, pandas, engine='pyarrow': first 32400000, gap 1000
hour 9, pyarrow: first 32400000, gap 1000
hour 9, polars: first 32400000, gap 1000
hour 9, duckdb: first 32400000, gap 1000
63 bits, pandas: int, 200 of 200 as written
63 bits, pandas, engine='pyarrow': int, 200 of 200 as written
63 bits, pyarrow: int, 200 of 200 as written
63 bits, polars: int, 200 of 200 as written
63 bits, duckdb: int, 200 of 200 as written
64 bits, pandas: int, 200 of 200 as written
64 bits, pandas, engine='pyarrow': float, 1 of 200 as written
64 bits, pyarrow: float, 1 of 200 as written
64 bits, polars: str, 0 of 200 as written
64 bits, duckdb: int, 200 of 200 as written
TEXT
diff expected seen && echo "as written above"
