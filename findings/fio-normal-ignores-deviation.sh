#!/usr/bin/env bash
# fio: random_distribution=normal:1 reads a hot set about as wide as normal:25 does.
#
# fio 3.33 (Debian 12), 204,800 reads of 4 KiB in a file of 40 MiB, by fio's own log of its I/O.
# Shown: the share of the reads that goes to the 10 % of the blocks that are read most.
#
# Guess: as in the manual: the number is the deviation in percent. With normal:1 the hottest tenth
#        gets everything (it is five deviations to each side), with normal:10 38 %, with normal:25
#        16 %, and normal:50 is next to uniform.
# Seen:  the deviation only widens a curve that is there anyway: the mean of 12 random numbers, with
#        8.3 %. Nothing is narrower than that; normal:1 and normal:10 are the same, so are normal:50
#        and normal:99. A hash then scatters the blocks and maps several to one, so a third of the
#        file is never read even with normal:99.
#
#            normal:1 49 %, never read 57 %
#            normal:10 48 %, never read 54 %
#            normal:25 43 %, never read 47 %
#            normal:50 34 %, never read 32 %
#            normal:99 34 %, never read 32 %
#            zoned:99/1:1/99 100 %, never read 82 %
#
# For a test of a cache, or of a drive with a hot range: with normal:1 the hot set is ten times as
# large as asked for, and half of the reads leave it. zoned does what it says.
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
blocks=10240
for distribution in normal:1 normal:10 normal:25 normal:50 normal:99 zoned:99/1:1/99; do
    "$fio" --name=j --filename=f --thread --ioengine=null --rw=randread --bs=4k --norandommap \
        --size=$((blocks * 4096)) --io_size=$((20 * blocks * 4096)) \
        --random_distribution="$distribution" --write_iolog=log >/dev/null
    awk '$3 == "read" { print $4 }' log | sort | uniq -c | sort -rn |
        awk -v name="$distribution" -v blocks=$blocks '
            { all += $1; if (NR <= blocks / 10) hot += $1 }
            END {
                printf "%s %.0f %%, never read %.0f %%\n", name, 100 * hot / all,
                    100 - 100 * NR / blocks
            }'
    rm log
done | tee seen
cat >expected <<'TEXT'
normal:1 49 %, never read 57 %
normal:10 48 %, never read 54 %
normal:25 43 %, never read 47 %
normal:50 34 %, never read 32 %
normal:99 34 %, never read 32 %
zoned:99/1:1/99 100 %, never read 82 %
TEXT
diff expected seen && echo "as written above"
