#!/usr/bin/env bash
# fio: the shares of bssplit are not made to add up. The last size gets the rest, or nothing.
#
# fio 3.33 (Debian 12), reads of a file of 32 MiB, sizes counted in fio's own log of its I/O.
#
# Guess: shares that do not add up to 100 are refused, or scaled.
# Seen:  neither, without a word. The sizes get their shares in the order given, and the last one
#        what is left of 100: of 30 and 30 it gets 70, of 60 and 60 it gets 40, and of 60, 60 and 60
#        the third size never occurs.
#
#            4k/60:64k/60: 4096 62 %, 65536 38 %
#            4k/30:64k/30: 4096 33 %, 65536 67 %
#            64k/30:4k/30: 4096 68 %, 65536 32 %
#            4k/60:8k/60:64k/60: 4096 61 %, 8192 39 %
#
# For a comparison: bytes per second of a mixture are those of another mixture if its shares are
# weights, as in other tools.
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
for split in 4k/60:64k/60 4k/30:64k/30 64k/30:4k/30 4k/60:8k/60:64k/60; do
    "$fio" --name=j --filename=f --thread --rw=read --size=32m --bssplit="$split" \
        --write_iolog=log >/dev/null
    awk '$3 == "read" { print $5 }' log | sort -n | uniq -c | awk -v split_by="$split" '
        { size[NR] = $2; count[NR] = $1; all += $1 }
        END {
            printf "%s:", split_by
            for (i = 1; i <= NR; i++)
                printf("%s %d %.0f %%", (i > 1 ? "," : ""), size[i], 100 * count[i] / all)
            print ""
        }'
    rm log
done | tee seen
cat >expected <<'TEXT'
4k/60:64k/60: 4096 62 %, 65536 38 %
4k/30:64k/30: 4096 33 %, 65536 67 %
64k/30:4k/30: 4096 68 %, 65536 32 %
4k/60:8k/60:64k/60: 4096 61 %, 8192 39 %
TEXT
diff expected seen && echo "as written above"
