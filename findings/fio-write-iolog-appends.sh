#!/usr/bin/env bash
# fio: write_iolog adds to a log that exists, so a trace that is taken again plays both runs.
#
# fio 3.33 (Debian 12). A job of eight reads with gaps of 50 ms writes its log; then the same job
# again, to the same file; after each, the log is replayed.
#
# Guess: a log is written anew, as fio's logs of latency and bandwidth are.
# Seen:  the second run is put behind the first, with another header, and its times begin again. A
#        replay says "bad iolog3" of that header and goes on: twice the requests and twice the time,
#        and if the two runs had other options, one after the other, reported as one job.
#
#            run 1: 8 reads in the latency log, 8 in the iolog, replayed 8 from 1 header
#            run 2: 8 reads in the latency log, 16 in the iolog, replayed 16 from 2 headers
#
# For whoever captures requests of a KV tier to replay them: remove the log before each run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall fio 2>/dev/null |
    awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$work/system/lib/x86_64-linux-gnu:$libraries/ceph
fio=$work/system/usr/bin/fio
[ "$("$fio" --version)" = fio-3.33 ] || { echo "another version: $("$fio" --version)"; exit 1; }
truncate -s 32K f
for run in 1 2; do
    "$fio" --name=j --filename=f --thread --ioengine=null --rw=read --bs=4k --size=32k \
        --thinktime=50ms --write_iolog=log --write_lat_log=run >/dev/null
    "$fio" --name=r --filename=f --thread --ioengine=null --read_iolog=log \
        --write_lat_log=replay >/dev/null 2>&1
    echo "run $run: $(wc -l <run_lat.1.log) reads in the latency log, $(grep -c read log) in the" \
        "iolog, replayed $(wc -l <replay_lat.1.log) from $(grep -c version log)" \
        "header$([ "$run" = 1 ] || echo s)"
done | tee seen
cat >expected <<'TEXT'
run 1: 8 reads in the latency log, 8 in the iolog, replayed 8 from 1 header
run 2: 8 reads in the latency log, 16 in the iolog, replayed 16 from 2 headers
TEXT
diff expected seen && echo "as written above"
