#!/usr/bin/env bash
# foyer: a disk cache for values of 2^n bytes holds down to half of its capacity, and 16 MiB never.
#
# foyer 0.22.6 (a hybrid cache in Rust), tokio 1.54.1, a directory of 256 MiB, all else by default
# (block engine, blocks of 16 MiB). 512 MiB of values are inserted, each when the last is on disk;
# then all are asked for, once more after a restart.
#
# Guess: it holds 256 MiB less some percent for indexes, whatever the size, as long as a value is
#        not larger than a block; one that is larger is refused.
# Seen:  an entry is header, key and value, rounded up to 4 KiB, lies in one block, and each block
#        has an index. A value of 8 MiB is once in a block of 16 MiB, one of 4 MiB three times, and
#        what is left of the block is lost. 8 KiB less, and twice as many are held. A value of 16
#        MiB, the documented maximum, is accepted without an error and is not there afterwards.
#
#            1024 KiB: 212 MiB of 256
#            4096 KiB: 176 MiB of 256
#            8192 KiB: 120 MiB of 256
#            8184 KiB: 239 MiB of 256
#            16384 KiB: 0 MiB of 256
#            16376 KiB: 239 MiB of 256
#
# For KV blocks, whose sizes mostly are powers of two: a block of the engine should be a multiple of
# the entry with its header (here 8 KiB more), or be a file of its own kind, without headers.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export CARGO_TARGET_DIR=$work/target CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
cargo init -q --name ask --vcs none
cargo add -q foyer@=0.22.6
cargo add -q tokio@=1.54.1 --features rt-multi-thread,macros
cat >src/main.rs <<'RUST'
use foyer::*;

const KIB: usize = 1 << 10;

async fn open() -> HybridCache<u64, Vec<u8>> {
    let device = FsDeviceBuilder::new("disk").with_capacity(256 * KIB * KIB).build().unwrap();
    HybridCacheBuilder::new()
        .with_policy(HybridCachePolicy::WriteOnInsertion)
        .memory(1)
        .with_weighter(|_, value: &Vec<u8>| value.len())
        .storage()
        .with_engine_config(BlockEngineConfig::new(device))
        .build()
        .await
        .unwrap()
}

#[tokio::main]
async fn main() {
    for size in [1024, 4096, 8192, 8184, 16384, 16376] {
        let count = (512 * KIB / size) as u64;
        let cache = open().await;
        for key in 0..count {
            cache.insert(key, vec![key as u8; size * KIB]);
            cache.storage().wait().await;
        }
        cache.close().await.unwrap();
        drop(cache);
        let cache = open().await;
        let mut held = 0;
        for key in 0..count {
            held += usize::from(cache.get(&key).await.unwrap().is_some());
        }
        println!("{size} KiB: {} MiB of 256", held * size / KIB);
        cache.close().await.unwrap();
        std::fs::remove_dir_all("disk").unwrap();
    }
}
RUST
cargo build -q 2>log || { tail log; exit 1; }
target/debug/ask | tee seen
cat >expected <<'TEXT'
1024 KiB: 212 MiB of 256
4096 KiB: 176 MiB of 256
8192 KiB: 120 MiB of 256
8184 KiB: 239 MiB of 256
16384 KiB: 0 MiB of 256
16376 KiB: 239 MiB of 256
TEXT
diff expected seen && echo "as written above"
