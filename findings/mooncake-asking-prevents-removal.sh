#!/usr/bin/env bash
# Mooncake Store: asking whether an object exists keeps it from being removed.
#
# mooncake-transfer-engine-non-cuda 0.3.13.post1, Python 3.11, Debian 12, loopback over TCP.
#
# Guess: `is_exist` only reads; `remove` of an object that nobody holds succeeds; `remove_all`
#        returns how many objects it removed and leaves none.
# Seen:  `is_exist` and `get` give the object a lease (-default_kv_lease_ttl, 10 s), and `remove`
#        answers -706 until it has run out. So "if it exists, remove it" never removes, and asking
#        afterwards whether the removal worked starts the ten seconds again. `remove_all` returns 0
#        then, no error, and everything is still there. `remove(key, force=True)` removes.
#
#            put a: 0
#            remove a, never asked for: 0
#            put b: 0
#            is_exist b: 1
#            remove b: -706
#            remove_all: 0
#            is_exist b: 1
#            remove b 13 s later: 0
#            put c: 0
#            is_exist c: 1
#            remove c by force: 0
#            is_exist c: 0
#
# For a store below an engine: a probe that asks every few seconds pins what it asks for.
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
print("put a:", store.put("a", b"value"))
print("remove a, never asked for:", store.remove("a"))
print("put b:", store.put("b", b"value"))
print("is_exist b:", store.is_exist("b"))
print("remove b:", store.remove("b"))
print("remove_all:", store.remove_all())
print("is_exist b:", store.is_exist("b"))
time.sleep(13)
print("remove b 13 s later:", store.remove("b"))
print("put c:", store.put("c", b"value"))
print("is_exist c:", store.is_exist("c"))
print("remove c by force:", store.remove("c", True))
print("is_exist c:", store.is_exist("c"))
store.close()
PYTHON
venv/bin/python ask.py "$rpc" "$http" 2>client.log | tee seen
cat >expected <<'TEXT'
put a: 0
remove a, never asked for: 0
put b: 0
is_exist b: 1
remove b: -706
remove_all: 0
is_exist b: 1
remove b 13 s later: 0
put c: 0
is_exist c: 1
remove c by force: 0
is_exist c: 0
TEXT
diff expected seen && echo "as written above"
