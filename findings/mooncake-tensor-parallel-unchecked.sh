#!/usr/bin/env bash
# Mooncake Store: get_tensor_with_tp asks for the size and dimension of a split, and uses neither.
#
# mooncake-transfer-engine-non-cuda 0.3.13.post1 with PyTorch 1.13.1 of Debian 12, Python 3.11,
# loopback over TCP. The tensor is 4 x 4, from 0 to 15, put with tp_size=2.
#
# Guess: as its help has it, `get_tensor_with_tp(key, rank, size, dimension)` slices what is stored
#        for the one who asks; another size or dimension than at the put is sliced anew or refused.
# Seen:  it answers with the piece of that number as it was put. Of four readers the first two get
#        halves where quarters are due, with no error, and the others None. A split by columns is
#        answered by rows. A tensor put whole is not sliced: None for size 2. And a put stores the
#        pieces of all ranks, so the put of rank 1 answers 0 and what it brings is dropped.
#
#            put 0 of 2 by rows: 0
#            rows, 0 of 2: [[0, 1, 2, 3], [4, 5, 6, 7]]
#            columns, 0 of 2: [[0, 1, 2, 3], [4, 5, 6, 7]]
#            rows, 0 of 4: [[0, 1, 2, 3], [4, 5, 6, 7]]
#            rows, 1 of 4: [[8, 9, 10, 11], [12, 13, 14, 15]]
#            rows, 2 of 4: None
#            rows, 0 of 1: None
#            put 1 of 2 by rows, negated: 0
#            rows, 1 of 2: [[8, 9, 10, 11], [12, 13, 14, 15]]
#            put whole: 0
#            whole, rows, 0 of 2: None
#
# For KV cache that a larger or smaller engine is to reuse: size and dimension belong into the key.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${master:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
# Mooncake's libraries are linked with those of RDMA, which TCP does not use.
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall python3-torch \
    libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1 2>/dev/null |
    awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
rm ./*.deb
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$work/system/lib/x86_64-linux-gnu:$work/system/usr/lib
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$libraries/blas:$libraries/lapack
export PYTHONPATH=$work/system/usr/lib/python3/dist-packages
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

import torch
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
ROWS, COLUMNS = 0, 1


def get(*where):
    tensor = store.get_tensor_with_tp(*where)
    return None if tensor is None else tensor.int().tolist()


tensor = torch.arange(16, dtype=torch.float32).reshape(4, 4)
print("put 0 of 2 by rows:", store.put_tensor_with_tp("k", tensor, 0, 2, ROWS))
print("rows, 0 of 2:", get("k", 0, 2, ROWS))
print("columns, 0 of 2:", get("k", 0, 2, COLUMNS))
print("rows, 0 of 4:", get("k", 0, 4, ROWS))
print("rows, 1 of 4:", get("k", 1, 4, ROWS))
print("rows, 2 of 4:", get("k", 2, 4, ROWS))
print("rows, 0 of 1:", get("k", 0, 1, ROWS))
print("put 1 of 2 by rows, negated:", store.put_tensor_with_tp("k", -tensor, 1, 2, ROWS))
print("rows, 1 of 2:", get("k", 1, 2, ROWS))
print("put whole:", store.put_tensor("whole", tensor))
print("whole, rows, 0 of 2:", get("whole", 0, 2, ROWS))
store.close()
PYTHON
venv/bin/python ask.py "$rpc" "$http" 2>client.log | tee seen
cat >expected <<'TEXT'
put 0 of 2 by rows: 0
rows, 0 of 2: [[0, 1, 2, 3], [4, 5, 6, 7]]
columns, 0 of 2: [[0, 1, 2, 3], [4, 5, 6, 7]]
rows, 0 of 4: [[0, 1, 2, 3], [4, 5, 6, 7]]
rows, 1 of 4: [[8, 9, 10, 11], [12, 13, 14, 15]]
rows, 2 of 4: None
rows, 0 of 1: None
put 1 of 2 by rows, negated: 0
rows, 1 of 2: [[8, 9, 10, 11], [12, 13, 14, 15]]
put whole: 0
whole, rows, 0 of 2: None
TEXT
diff expected seen && echo "as written above"
