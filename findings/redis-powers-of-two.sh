#!/usr/bin/env bash
# Redis: a memory tier for blocks of 2^n bytes holds a fifth less than for blocks 64 bytes shorter.
#
# Redis 7.0.15 (Debian 12), maxmemory 128 MiB, allkeys-lru. 200 MiB of values of one size are set;
# shown are the bytes of the values that are held then.
#
# Guess: 128 MiB less some 100 bytes a key, so 97 % and more from blocks of 128 KiB on.
# Seen:  a header and a zero lie beside the value, in the same piece of memory. With them, a value
#        of 2^n bytes takes the next class of the allocator, which is a quarter larger, and
#        `used_memory`, by which Redis evicts, counts the class. A value that leaves room for the
#        header takes the class of its own size.
#
#            131072: 79 %
#            131008: 99 %
#            524288: 79 %
#            524224: 99 %
#            1048576: 78 %
#            1048512: 98 %
#            1310720: 81 %
#            1310656: 98 %
#
# For a tier of KV blocks, whose bytes are tokens x heads x dimension and so mostly powers of two:
# plan 1.28 times the memory, or split a block in two keys, of 2^n bytes less 64, and the rest.
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
redis-server --port 0 --unixsocket socket --maxmemory 128mb --maxmemory-policy allkeys-lru \
    --save '' >log &
server=$!
until redis-cli -s socket ping >/dev/null 2>&1; do sleep 0.1; done
for size in 131072 131008 524288 524224 1048576 1048512 1310720 1310656; do
    redis-cli -s socket flushall >/dev/null
    # One client: what is on its way for others counts as used memory, too.
    redis-benchmark -s socket -q -t set -c 1 -r 1000000000 -d $size -n $((200 * 1048576 / size)) \
        >/dev/null
    held=$(redis-cli -s socket dbsize)
    echo "$size: $(((100 * held * size / 1048576 + 64) / 128)) %"
done | tee seen
cat >expected <<'TEXT'
131072: 79 %
131008: 99 %
524288: 79 %
524224: 99 %
1048576: 78 %
1048512: 98 %
1310720: 81 %
1310656: 98 %
TEXT
diff expected seen && echo "as written above"
