#!/usr/bin/env bash
# Packs programs, kernels and run.sh into the folder $1, with the trace $2 if there is one.
set -euo pipefail
out=$(realpath -m "$1") trace=${2:+$(realpath "$2")}
here=$(cd "${0%/*}" && pwd)
cd "$here/../../../.."
mkdir -p "$out"

# The path is in cargo's messages: the name of a test program has a hash.
build() { # name, target, arguments of cargo
    local path
    path=$(cargo "${@:3}" --release --message-format=json |
        sed -n "s/.*\"name\":\"$2\".*\"executable\":\"\([^\"]*\)\".*/\1/p" | tail -n 1)
    install "$path" "$out/$1"
    # Ubuntu 22.04, Debian 12 and RHEL 9 have 2.34.
    local needs
    needs=$(grep -ao 'GLIBC_2\.[0-9]*' "$path" | sort -Vu | tail -n 1)
    [ "${needs#GLIBC_2.}" -le 34 ] || {
        echo "error: $1 needs $needs, and machines with GPUs have 2.34"
        echo '  hint: pack it on a system that is no newer than Debian 12'
        exit 1
    } >&2
}
build ripieno ripieno build --package ripieno
build bench ripieno-bench build --package ripieno-bench
build cuda-tests cuda test --no-run --package gio-kernels --features cuda --test cuda

# Kernels, which are also embedded in the programs: to read, or to compile by hand.
install -m 644 kernels/ptx/gio_kernel.ptx kernels/ptx/gio_pool.ptx bench/ptx/bench_gpu.ptx "$out"
[ -z "$trace" ] || install -m 644 "$trace" "$out/trace.jsonl"
install "$here/run.sh" "$out/run.sh"
{
    echo "packed from: $(git describe --always --dirty --abbrev=12)"
    echo "compiler: $(rustc --version)"
} >"$out/packed.txt"
# Some services reject larger uploads. Results of a run are no part of the package.
bytes=$(($(find "$out" -maxdepth 1 -type f -printf '%s + ') 0))
[ "$bytes" -le $((60 << 20)) ] || {
    echo "error: $out is $((bytes >> 20)) MiB, more than 60: is something else in it?" >&2
    exit 1
}
echo "$out: $((bytes >> 20)) MiB"
echo 'on the machine with the GPU: ./run.sh, then bring results/results.tgz back'
