#!/usr/bin/env bash
# sysbench fileio: the files are zeros, all writes are zeros, and --rand-type changes nothing.
#
# sysbench 1.0.20 (Debian 12), two files of 16 MiB, 2,048 blocks of 16 KiB, 20,000 random reads or
# writes of them, their places by strace; shares to the nearest 5 %.
#
# Guess: files and writes have random bytes. By default (--rand-type=special, 75 % to 1 % of the
#        values) reads have a hot range, with pareto another one, with uniform none.
# Seen:  files are prepared with zeros, and 20,000 writes later there are still only zeros in them.
#        The distribution is for its database tests; with fileio the same options are taken and have
#        no effect: the tenth of the blocks that is read most gets what chance gives it.
#
#            bytes other than 0 when prepared: 0
#            bytes other than 0 after the writes: 0
#            reads that go to the hottest tenth, uniform: 15 %
#            reads that go to the hottest tenth, special: 15 %
#            reads that go to the hottest tenth, pareto: 15 %
#
# For drives and file systems that pack, or that know of zeros: neither reads nor writes reach the
# flash. And "with a hot range" measures a cache that holds none.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get -q download strace >/dev/null 2>&1
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall sysbench \
    libluajit2-5.1-2 libmariadb3 2>/dev/null | awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$work/system/lib/x86_64-linux-gnu
sysbench=$work/system/usr/bin/sysbench
[ "$("$sysbench" --version)" = 'sysbench 1.0.20' ] || { "$sysbench" --version; exit 1; }
fileio() { "$sysbench" fileio --file-num=2 --file-total-size=32M "$@" >/dev/null; }
bytes() { cat test_file.* | tr -d '\0' | wc -c; }
{
    fileio prepare
    echo "bytes other than 0 when prepared: $(bytes)"
    fileio --file-test-mode=rndwr --time=0 --events=20000 --file-fsync-freq=0 run
    echo "bytes other than 0 after the writes: $(bytes)"
    for kind in uniform special pareto; do
        "$work/system/usr/bin/strace" -f -e trace=pread64 -o calls "$sysbench" fileio \
            --file-num=2 --file-total-size=32M --file-test-mode=rndrd --time=0 --events=20000 \
            --rand-type=$kind run >/dev/null
        # Descriptor and offset of each read of a block.
        sed -n 's/.*pread64(\([0-9]*\), .*, 16384, \([0-9]*\)) .*/\1 \2/p' calls | sort | uniq -c |
            sort -rn | awk -v kind=$kind '
                { all += $1; if (NR <= 205) hot += $1 }
                END { printf "reads that go to the hottest tenth, %s: %d %%\n", kind,
                      5 * int(20 * hot / all + 0.5) }'
    done
} | tee seen
cat >expected <<'TEXT'
bytes other than 0 when prepared: 0
bytes other than 0 after the writes: 0
reads that go to the hottest tenth, uniform: 15 %
reads that go to the hottest tenth, special: 15 %
reads that go to the hottest tenth, pareto: 15 %
TEXT
diff expected seen && echo "as written above"
