#!/usr/bin/env bash
# fio: an iolog's `wait` counts milliseconds since the start; a log from 0 loses its first gap.
#
# fio 3.33 (Debian 12), four reads, their times of issue (s, rounded to 2) by fio's own latency log.
#
# Guess: as in the manual: `wait` of a version 2 log is in microseconds and relative to the `wait`
#        before it; the time stamps of version 3 start at 0.
# Seen:  neither. `wait 2000` is "not before 2,000 ms since the start": three of them are one gap,
#        and a log in microseconds plays a thousand times too slowly. replay_time_scale does not
#        change it. In version 3, where it does, a first request at 0 makes the gap after it vanish:
#        the second goes at once, and all others are early by that gap. If the first request is at
#        1 us, all gaps are right.
#
#            version 2, wait 2000 2000 2000: 0 2 2 2
#            version 2, wait 2000 4000 6000: 0 2 4 6
#            version 2, wait 2000 4000 6000, half as fast: 0 2 4 6
#            version 3, 0 2000000 4000000 6000000: 0 0 2 4
#            version 3, 1 2000000 4000000 6000000: 0 2 4 6
#            version 3, 1 2000000 4000000 6000000, half as fast: 0 4 8 12
#
# For whoever makes an iolog from a trace: shift it so that the first time stamp is 1, not 0.
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
truncate -s 1M f

waits() {
    printf 'fio version 2 iolog\nf add\nf open\nf read 0 4096\n'
    local number=0 wait
    for wait; do
        number=$((number + 1))
        printf 'f wait %d 0\nf read %d 4096\n' "$wait" $((number * 4096))
    done
    echo 'f close'
}

stamps() {
    printf 'fio version 3 iolog\n0 f add\n0 f open\n'
    local number=0 stamp
    for stamp; do
        printf '%d f read %d 4096\n' "$stamp" $((number * 4096))
        number=$((number + 1))
    done
    echo "$stamp f close"
}

# Three copies of each, all at the same time: a machine that stalls delays, and the earliest counts.
cases=0
replay() {
    cases=$((cases + 1))
    local folder="case$cases" copy
    mkdir "$folder"
    echo "$1" >"$folder/title"
    cat >"$folder/log"
    for copy in 1 2 3; do
        "$fio" --name=j --filename=f --thread --ioengine=null --read_iolog="$folder/log" \
            --write_lat_log="$folder/$copy" "${@:2}" >/dev/null &
    done
}

slower=--replay_time_scale=50
replay 'version 2, wait 2000 2000 2000' < <(waits 2000 2000 2000)
replay 'version 2, wait 2000 4000 6000' < <(waits 2000 4000 6000)
replay 'version 2, wait 2000 4000 6000, half as fast' $slower < <(waits 2000 4000 6000)
replay 'version 3, 0 2000000 4000000 6000000' < <(stamps 0 2000000 4000000 6000000)
replay 'version 3, 1 2000000 4000000 6000000' < <(stamps 1 2000000 4000000 6000000)
replay 'version 3, 1 2000000 4000000 6000000, half as fast' $slower \
    < <(stamps 1 2000000 4000000 6000000)
wait
for folder in $(seq -f case%g "$cases"); do
    awk -F', *' -v title="$(cat "$folder/title")" '
        !(FNR in first) || $1 < first[FNR] { first[FNR] = $1 }
        END {
            printf "%s:", title
            for (i = 1; i in first; i++) printf " %d", 2 * int((first[i] + 1000) / 2000)
            print ""
        }' "$folder"/*_lat.1.log
done | tee seen
cat >expected <<'TEXT'
version 2, wait 2000 2000 2000: 0 2 2 2
version 2, wait 2000 4000 6000: 0 2 4 6
version 2, wait 2000 4000 6000, half as fast: 0 2 4 6
version 3, 0 2000000 4000000 6000000: 0 0 2 4
version 3, 1 2000000 4000000 6000000: 0 2 4 6
version 3, 1 2000000 4000000 6000000, half as fast: 0 4 8 12
TEXT
diff expected seen && echo "as written above"
