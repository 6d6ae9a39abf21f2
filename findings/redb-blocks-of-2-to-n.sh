#!/usr/bin/env bash
# redb: values of 2^n bytes take twice their size on disk, values 64 bytes shorter take theirs.
#
# redb 4.6.0 (a key-value store in Rust), all by default. 24 MiB of values of one size are inserted;
# shown is what the file has on disk then, over the bytes of the values.
#
# Guess: a B-tree with some percent for keys and pages, whatever the size of a value.
# Seen:  a page is 2^n times 4 KiB, and a value that is larger than one has such a page for itself,
#        with a header in it. So a value of 2^n bytes lies in a page of 2^(n+1) that is written
#        whole, and half of the file is nothing. A value of 768 KiB takes a third more, one that
#        leaves 64 bytes takes what it has.
#
#            65536 bytes: 2.0
#            65472 bytes: 1.0
#            786432 bytes: 1.3
#            1048576 bytes: 2.0
#            1048512 bytes: 1.0
#
# For KV blocks, whose sizes are 2^n more often than not: half of the drive's room, and of what it
# can write in its life. Blocks have to leave room for the header, or be split.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export CARGO_TARGET_DIR=$work/target CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0
cargo init -q --name ask --vcs none
cargo add -q redb@=4.6.0
cat >src/main.rs <<'RUST'
use std::os::unix::fs::MetadataExt;

use redb::{Database, TableDefinition};

const BLOCKS: TableDefinition<u64, &[u8]> = TableDefinition::new("blocks");

fn main() {
    for size in [65_536, 65_472, 786_432, 1_048_576, 1_048_512] {
        let count = (24 << 20) / size;
        let database = Database::create("file").unwrap();
        for number in 0..count {
            let transaction = database.begin_write().unwrap();
            let mut table = transaction.open_table(BLOCKS).unwrap();
            table.insert(number as u64, vec![1; size].as_slice()).unwrap();
            drop(table);
            transaction.commit().unwrap();
        }
        let on_disk = std::fs::metadata("file").unwrap().blocks() * 512;
        println!("{size} bytes: {:.1}", on_disk as f64 / (count * size) as f64);
        drop(database);
        std::fs::remove_file("file").unwrap();
    }
}
RUST
cargo build -q 2>log || { tail log; exit 1; }
target/debug/ask | tee seen
cat >expected <<'TEXT'
65536 bytes: 2.0
65472 bytes: 1.0
786432 bytes: 1.3
1048576 bytes: 2.0
1048512 bytes: 1.0
TEXT
diff expected seen && echo "as written above"
