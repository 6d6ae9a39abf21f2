#!/usr/bin/env bash
# Mooncake Store answers 0 to a put of a key that exists, and keeps the bytes it had.
#
# mooncake-transfer-engine-non-cuda 0.3.13.post1, Python 3.11, Debian 12, loopback over TCP.
#
# Guess: a second `put` of a key replaces its value, or fails with an error code.
# Seen:  it returns 0, which is also the answer to a put that stored something, and `get` returns
#        the first value. `put_batch` returns 0 for a batch in which one key existed; the others are
#        stored. Only `upsert` replaces. A missing key is no error for `get` either: it returns b"",
#        which no stored value can be, because an empty one is refused (-600).
#
#            put k first: 0
#            put k second: 0
#            get k: b'first'
#            put_batch k, new: 0
#            get k, new: b'first' b'third'
#            upsert k second: 0
#            get k: b'second'
#            get of a missing key: b''
#            put of an empty value: -600
#
# For a store below an engine: keys must name content, as hashes of tokens do. A cache that stores
# changed bytes under an old key (another adapter, other weights) is told that it succeeded.
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
venv/bin/mooncake_master -rpc_port "$rpc" -metrics_port "$metrics" -enable_http_metadata_server \
    -http_metadata_server_port "$http" >master.log 2>&1 &
master=$!
cat >ask.py <<'PYTHON'
import sys
import time

from mooncake.store import MooncakeDistributedStore

rpc, http = sys.argv[1:]
metadata, size = f"http://127.0.0.1:{http}/metadata", 16 << 20
for _ in range(60):
    store = MooncakeDistributedStore()
    where = f"127.0.0.1:{rpc}"
    if store.setup("localhost", metadata, size, size, "tcp", "", where) == 0:
        break
    time.sleep(1)
else:
    sys.exit("the master does not answer")
print("put k first:", store.put("k", b"first"))
print("put k second:", store.put("k", b"second"))
print("get k:", store.get("k"))
print("put_batch k, new:", store.put_batch(["k", "new"], [b"second", b"third"]))
print("get k, new:", store.get("k"), store.get("new"))
print("upsert k second:", store.upsert("k", b"second"))
print("get k:", store.get("k"))
print("get of a missing key:", store.get("missing"))
print("put of an empty value:", store.put("empty", b""))
store.close()
PYTHON
venv/bin/python ask.py "$rpc" "$http" 2>client.log | tee seen
cat >expected <<'TEXT'
put k first: 0
put k second: 0
get k: b'first'
put_batch k, new: 0
get k, new: b'first' b'third'
upsert k second: 0
get k: b'second'
get of a missing key: b''
put of an empty value: -600
TEXT
diff expected seen && echo "as written above"
