#!/usr/bin/env bash
# foyer: a memory cache of 64 MiB holds 1 GiB if its values are large, and says so itself.
#
# foyer 0.22.6, its cache in memory, by default, with a weigher of bytes; capacity 64 MiB. 200
# values of one size are inserted; shown are those that are found then, and what `usage()` says.
#
# Guess: it never holds more than its capacity; a value that is larger is not kept.
# Seen:  there are eight shards, each with an eighth of the capacity, and a shard evicts before it
#        takes a new value, but takes it in any case. So each of them holds one value of whatever
#        size. Above an eighth of the capacity, the capacity is no limit: eight values are.
#
#            1 MiB each: 64 held, 64 MiB
#            8 MiB each: 8 held, 64 MiB
#            16 MiB each: 8 held, 128 MiB
#            64 MiB each: 8 held, 512 MiB
#            128 MiB each: 8 held, 1024 MiB
#
# For KV blocks, or prefixes as one value: memory is bounded by eight times the largest value. A
# cache sized to what a machine has left takes the rest, too. with_filter can refuse what is larger
# than an eighth; with_shards(1) bounds memory by the capacity, or by one value.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export CARGO_TARGET_DIR=$work/target CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
cargo init -q --name ask --vcs none
cargo add -q foyer@=0.22.6
cat >src/main.rs <<'RUST'
use foyer::{Cache, CacheBuilder};

const MIB: usize = 1 << 20;

fn main() {
    for size in [1, 8, 16, 64, 128] {
        let cache: Cache<u64, Vec<u8>> = CacheBuilder::new(64 * MIB)
            .with_weighter(|_, value: &Vec<u8>| value.capacity())
            .build();
        for key in 0..200 {
            cache.insert(key, Vec::with_capacity(size * MIB));
        }
        let held = (0..200).filter(|key| cache.get(key).is_some()).count();
        println!("{size} MiB each: {held} held, {} MiB", cache.usage() / MIB);
    }
}
RUST
cargo build -q 2>log || { tail log; exit 1; }
target/debug/ask | tee seen
cat >expected <<'TEXT'
1 MiB each: 64 held, 64 MiB
8 MiB each: 8 held, 64 MiB
16 MiB each: 8 held, 128 MiB
64 MiB each: 8 held, 512 MiB
128 MiB each: 8 held, 1024 MiB
TEXT
diff expected seen && echo "as written above"
