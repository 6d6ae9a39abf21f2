#!/usr/bin/env bash
# Mooncake Store: files of its disk tier outlive a restart, but no object does; nothing checks them.
#
# mooncake-transfer-engine-non-cuda 0.3.13.post1, Python 3.11, Debian 12, loopback over TCP. The
# master has -root_fs_dir, so that objects are written to files, too; its client gives 32 MiB of
# memory. 64 objects of 1 MiB are put, three files are then damaged, and all is started again.
#
# Guess: files are named after the keys, so a restarted store finds them, or it removes them. What
#        is read from a file is checked; a key whose file is gone or short does not exist.
# Seen:  after a restart no key exists, and all files are still there. They are only written over
#        if the same keys are put again. A changed byte is served as it is. Of a short file, and
#        of none, `is_exist` says 1 for ever, and `get` returns b"", as for a key that is missing.
#
#            put: 64 objects exist, 64 read right, 64 files
#            changed file: exists 1, get: wrong bytes
#            short file: exists 1, get: b''
#            removed file: exists 1, get: b''
#            restarted: 0 objects exist, 63 files
#
# For a tier on SSDs: it is a cache of one run. After a restart everything is computed again, beside
# a full drive (-quota_bytes counts old files and makes room); what is read needs its own checksum.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${master:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
# Its libraries are linked with those of RDMA, which TCP does not use.
apt-get -q download libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1 >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
export LD_LIBRARY_PATH=$work/system/usr/lib/x86_64-linux-gnu:$work/system/lib/x86_64-linux-gnu
read -r rpc metrics http <<<"$(python3 -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(each.getsockname()[1] for each in held))')"
cat >ask.py <<'PYTHON'
import hashlib
import pathlib
import sys
import time

from mooncake.store import MooncakeDistributedStore

rpc, http, run = sys.argv[1:]
KEYS, MIB = range(64), 1 << 20
metadata, where = f"http://127.0.0.1:{http}/metadata", f"127.0.0.1:{rpc}"
for _ in range(60):
    store = MooncakeDistributedStore()
    if store.setup("localhost", metadata, 32 * MIB, 64 * MIB, "tcp", "", where) == 0:
        break
    time.sleep(1)
else:
    sys.exit("the master does not answer")


def files():
    return {path.name: path for path in pathlib.Path("tier").rglob("*") if path.is_file()}


def value(key):
    return hashlib.shake_256(b"%d" % key).digest(MIB)


def exist():
    return sum(store.is_exist(f"key{key}") == 1 for key in KEYS)


def damaged(title, key):
    got = store.get(f"key{key}")
    text = "right" if got == value(key) else got if len(got) < MIB else "wrong bytes"
    print(f"{title} file: exists {store.is_exist(f'key{key}')}, get: {text}")


if run == "first":
    for key in KEYS:
        while store.put(f"key{key}", value(key)) != 0:
            time.sleep(0.1)
    for _ in range(60):
        if len(files()) == len(KEYS):
            break
        time.sleep(1)
    right = sum(store.get(f"key{key}") == value(key) for key in KEYS)
    print(f"put: {exist()} objects exist, {right} read right, {len(files())} files")
    # The first ones are no longer in memory.
    with open(files()["key0"], "r+b") as file:
        file.seek(500)
        file.write(bytes([value(0)[500] ^ 1]))
    damaged("changed", 0)
    with open(files()["key1"], "r+b") as file:
        file.truncate(600_000)
    damaged("short", 1)
    files()["key2"].unlink()
    damaged("removed", 2)
else:
    time.sleep(3)
    print(f"restarted: {exist()} objects exist, {len(files())} files")
store.close()
PYTHON
mkdir tier
for run in first second; do
    venv/bin/mooncake_master -rpc_port "$rpc" -metrics_port "$metrics" \
        -enable_http_metadata_server -http_metadata_server_port "$http" \
        -root_fs_dir "$work/tier" >>master.log 2>&1 &
    master=$!
    venv/bin/python ask.py "$rpc" "$http" "$run" 2>>client.log
    kill "$master"
    wait "$master" || true
done >seen
cat seen
cat >expected <<'TEXT'
put: 64 objects exist, 64 read right, 64 files
changed file: exists 1, get: wrong bytes
short file: exists 1, get: b''
removed file: exists 1, get: b''
restarted: 0 objects exist, 63 files
TEXT
diff expected seen && echo "as written above"
