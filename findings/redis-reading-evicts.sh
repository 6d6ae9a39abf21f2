#!/usr/bin/env bash
# Redis: reading evicts. Large values that are asked for at once push others out of the memory.
#
# Redis 7.0.15 (Debian 12), maxmemory 64 MiB, allkeys-lru, all else by default. 60 values of 1 MiB
# fit. A client asks for 20 of them: each when it has the last, or all 20 at once, and then takes
# the answers a second later. Shown: what it got, and how many keys there are less than before.
#
# Guess: GET only reads. It makes a key the newest, and evicts none.
# Seen:  an answer that the client has not taken yet is a copy in the memory of the server, and it
#        counts for maxmemory. The next command of whatever client evicts as many other values, and
#        now and then one that is asked for. What the client reads is right; it only finds less the
#        next time, as do all others.
#
#            one by one: values right, keys gone: none
#            at once: values right, keys gone: 10 or more
#
# For a tier of KV blocks, read by MGET or pipelines of many MiB: what is in flight has to be left
# free below maxmemory, or asked for in parts. By default a client is given any amount.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall redis-server \
    libatomic1 libjemalloc2 liblua5.1-0 liblzf1 lua-bitop lua-cjson redis-tools 2>/dev/null |
    awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
export LD_LIBRARY_PATH=$work/system/usr/lib/x86_64-linux-gnu:$work/system/lib/x86_64-linux-gnu
export PATH=$work/system/usr/bin:$PATH
redis-server --version | grep -q 'v=7\.0\.15 ' || { redis-server --version; exit 1; }
redis-server --port 0 --unixsocket socket --maxmemory 64mb --maxmemory-policy allkeys-lru \
    --save '' >log &
server=$!
until redis-cli -s socket ping >/dev/null 2>&1; do sleep 0.1; done
cat >ask.py <<'PYTHON'
import os
import socket
import time

SIZE, KEYS = (1 << 20) - 64, 60
ASKED = range(40, KEYS)


class Client:
    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect("socket")
        self.answers = self.socket.makefile("rb")

    def send(self, *words):
        text = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self.socket.sendall(b"*%d\r\n" % len(words) + text)

    def answer(self):
        line = self.answers.readline()
        if line[:1] == b"$" and line[1:2] != b"-":
            return self.answers.read(int(line[1:]) + 2)[:-2]
        return line[1:].strip()

    def ask(self, *words):
        self.send(*words)
        return self.answer()


def show(title, read):
    other = Client()
    other.ask(b"FLUSHALL")
    values = [os.urandom(SIZE) for _ in range(KEYS)]
    for number, value in enumerate(values):
        other.ask(b"SET", b"%d" % number, value)
    before = int(other.ask(b"DBSIZE"))
    got = read(Client(), other)
    gone = before - int(other.ask(b"DBSIZE"))
    # One that is asked for may be among those evicted before its turn.
    right = sum(got[number] == values[number] for number in ASKED) >= len(ASKED) - 4
    text = "none" if gone == 0 else "10 or more" if gone >= 10 else gone
    print(f"{title}: values {'right' if right else 'wrong'}, keys gone: {text}")


def one_by_one(client, other):
    return {number: client.ask(b"GET", b"%d" % number) for number in ASKED}


def at_once(client, other):
    for number in ASKED:
        client.send(b"GET", b"%d" % number)
    time.sleep(1)
    other.ask(b"PING")
    return {number: client.answer() for number in ASKED}


show("one by one", one_by_one)
show("at once", at_once)
PYTHON
python3 ask.py | tee seen
cat >expected <<'TEXT'
one by one: values right, keys gone: none
at once: values right, keys gone: 10 or more
TEXT
diff expected seen && echo "as written above"
