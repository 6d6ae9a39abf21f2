#!/usr/bin/env bash
# nbdkit: a disk made slow by its delay filter answers 16 commands at a time, the rest wait in line.
#
# nbdkit 1.32.5 and fio 3.33 (Debian 12), a disk in memory with rdelay=100ms, random reads of 4 KiB
# for three seconds by fio's nbd engine over one connection. Shown: fio's mean latency, to the
# nearest 100 ms, by queue depth.
#
# Guess: a delay is latency, as of a drive: each read takes 100 ms more, however many are on
#        their way, so that depth hides it.
# Seen:  each connection has 16 threads, and a delay occupies one. At a depth of 64 a read takes
#        four times as long. With -t as large as the depth it is as guessed.
#
#            by default: depth 1 100 ms, depth 16 100 ms, depth 64 400 ms
#            -t 64: depth 1 100 ms, depth 16 100 ms, depth 64 100 ms
#
# For tests of how deep queues hide the latency of SSDs, which take hundreds of commands: they seem
# not to, from 16 on.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall fio nbdkit \
    2>/dev/null | awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$work/system/lib/x86_64-linux-gnu:$libraries/ceph
modules=$libraries/nbdkit
export PATH=$work/system/usr/bin:$PATH
[ "$(fio --version)" = fio-3.33 ] || { echo "another version: $(fio --version)"; exit 1; }
[ "$(nbdkit --version)" = "nbdkit 1.32.5" ] || { nbdkit --version; exit 1; }
ask() {
    local title=$1 depth seen=()
    shift
    for depth in 1 16 64; do
        timeout 30 nbdkit "$@" -U socket --filter="$modules/filters/nbdkit-delay-filter.so" \
            "$modules/plugins/nbdkit-memory-plugin.so" 64M rdelay=100ms \
            --run "fio --name=j --thread --ioengine=nbd --uri=nbd+unix:///?socket=socket \
                --rw=randread --bs=4k --size=64m --iodepth=$depth --runtime=3 --time_based \
                --output=result --output-format=json" >/dev/null 2>&1
        seen+=("depth $depth $(python3 -c '
import json
result = open("result").read()
(job,) = json.loads(result[result.index("{"):])["jobs"]
print(100 * round(job["read"]["clat_ns"]["mean"] / 1e8))') ms")
        rm -f socket result
    done
    local IFS=,
    echo "$title: ${seen[*]}" | sed 's/,/, /g'
}
{ ask "by default"; ask "-t 64" -t 64; } | tee seen
cat >expected <<'TEXT'
by default: depth 1 100 ms, depth 16 100 ms, depth 64 400 ms
-t 64: depth 1 100 ms, depth 16 100 ms, depth 64 100 ms
TEXT
diff expected seen && echo "as written above"
