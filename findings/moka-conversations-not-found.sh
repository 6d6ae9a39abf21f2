#!/usr/bin/env bash
# moka, quick_cache, foyer: of conversations that fit twice, caches in Rust find next to nothing.
#
# moka 0.12.16, quick_cache 0.7.0, foyer 0.22.6; caches of entries of one size. At each time a
# conversation begins; it asks for its block, stores it if it is not there, and comes back some
# times, then never again. Shown: what is found, of all that is asked for, in the second half.
#
# Guess: all policies find what LRU finds, 1/2 and 4/5, since no more than 400 blocks are ever in
#        use. TinyLFU, the default of moka, and newer ones only gain where the cache is too small.
# Seen:  what conversations used that have ended fills the cache, and counts for more than a block
#        seen once. Those are turned away, or pass through a small part of the cache and are gone
#        before the next turn. Of two turns four of six find next to nothing. More room is no help
#        to moka and quick_cache: the dead stay for good.
#
#            2 turns, 400 apart, room for 1000:
#            moka, lru: 50 %
#            moka, default: 3 %
#            quick_cache: 0 %
#            foyer, lru (its default): 50 %
#            foyer, s3fifo: 0 %
#            foyer, lfu: 0 %
#            5 turns, 100 apart, room for 1000:
#            moka, lru: 80 %
#            moka, default: 15 %
#            quick_cache: 57 %
#            foyer, lru (its default): 80 %
#            foyer, s3fifo: 66 %
#            foyer, lfu: 3 %
#            2 turns, 400 apart, room for 10000:
#            moka, lru: 50 %
#            moka, default: 0 %
#            quick_cache: 0 %
#            foyer, lru (its default): 50 %
#            foyer, s3fifo: 49 %
#            foyer, lfu: 50 %
#
# For a tier of KV blocks, which are used as long as their conversation goes on: a policy has to
# forget uses with time, or be LRU. Keys by Zipf's law, as in most benchmarks, do not show it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export CARGO_TARGET_DIR=$work/target CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
cargo init -q --name ask --vcs none
cargo add -q foyer@=0.22.6
cargo add -q moka@=0.12.16 --features sync
cargo add -q quick_cache@=0.7.0
cat >src/main.rs <<'RUST'
use std::hash::{BuildHasherDefault, DefaultHasher};

use foyer::{EvictionConfig, LfuConfig, LruConfig, S3FifoConfig};
use moka::policy::EvictionPolicy;
use quick_cache::{OptionsBuilder, UnitWeighter, sync};

/// The same numbers in each run.
type Hash = BuildHasherDefault<DefaultHasher>;

/// Percentage that is found, in the second half of some time, by conversations of `turns` turns. At
/// each time another one begins; its next turn comes `apart` later.
fn show(name: &str, turns: u64, apart: u64, get: impl Fn(u64) -> bool, put: impl Fn(u64)) {
    let (all, mut found, mut asked) = (40_000, 0, 0);
    for time in 0..all {
        for turn in 0..turns.min(1 + time / apart) {
            let conversation = time - turn * apart;
            let is_found = get(conversation);
            if !is_found {
                put(conversation);
            }
            asked += u64::from(time > all / 2);
            found += u64::from(time > all / 2 && is_found);
        }
    }
    println!("{name}: {} %", (100 * found + asked / 2) / asked);
}

fn main() {
    for (turns, apart, room) in [(2, 400, 1000), (5, 100, 1000), (2, 400, 10_000)] {
        println!("{turns} turns, {apart} apart, room for {room}:");
        let show = |name: &str, get: &dyn Fn(u64) -> bool, put: &dyn Fn(u64)| {
            show(name, turns, apart, get, put);
        };
        let policies = [("lru", EvictionPolicy::lru()), ("default", EvictionPolicy::default())];
        for (name, policy) in policies {
            let cache = moka::sync::Cache::builder()
                .max_capacity(room as u64)
                .eviction_policy(policy)
                .build_with_hasher(Hash::default());
            let put = |key| {
                cache.insert(key, ());
                cache.run_pending_tasks();
            };
            show(&format!("moka, {name}"), &|key| cache.get(&key).is_some(), &put);
        }
        let options = OptionsBuilder::new()
            .estimated_items_capacity(room)
            .weight_capacity(room as u64)
            .shards(8)
            .build()
            .unwrap();
        let lifecycle = sync::DefaultLifecycle::default();
        let cache = sync::Cache::with_options(options, UnitWeighter, Hash::default(), lifecycle);
        show("quick_cache", &|key| cache.get(&key).is_some(), &|key| cache.insert(key, ()));
        let policies: [(_, EvictionConfig); 3] = [
            ("lru (its default)", LruConfig::default().into()),
            ("s3fifo", S3FifoConfig::default().into()),
            ("lfu", LfuConfig::default().into()),
        ];
        for (name, policy) in policies {
            let cache: foyer::Cache<u64, (), Hash> = foyer::CacheBuilder::new(room)
                .with_eviction_config(policy)
                .with_hash_builder(Hash::default())
                .build();
            let put = |key| drop(cache.insert(key, ()));
            show(&format!("foyer, {name}"), &|key| cache.get(&key).is_some(), &put);
        }
    }
}
RUST
cargo build -q 2>log || { tail log; exit 1; }
target/debug/ask | tee seen
cat >expected <<'TEXT'
2 turns, 400 apart, room for 1000:
moka, lru: 50 %
moka, default: 3 %
quick_cache: 0 %
foyer, lru (its default): 50 %
foyer, s3fifo: 0 %
foyer, lfu: 0 %
5 turns, 100 apart, room for 1000:
moka, lru: 80 %
moka, default: 15 %
quick_cache: 57 %
foyer, lru (its default): 80 %
foyer, s3fifo: 66 %
foyer, lfu: 3 %
2 turns, 400 apart, room for 10000:
moka, lru: 50 %
moka, default: 0 %
quick_cache: 0 %
foyer, lru (its default): 50 %
foyer, s3fifo: 49 %
foyer, lfu: 50 %
TEXT
diff expected seen && echo "as written above"
