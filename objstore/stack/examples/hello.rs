//! Stores a KV block in a directory, and finds it when it is run again.

#![allow(clippy::print_stdout, reason = "a program")]

use ripieno_stack::{BlockId, BlockKey, Builder, KvShape, StackConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = KvShape { layers: 4, segments: 2, object_bytes: 8192, block_tokens: 16 };
    let config = StackConfig { capacity: Some(64 << 20), ..StackConfig::at("hello-store") };
    let store = Builder::new(config, shape).open()?;
    // An engine has a digest of the tokens here, and its own memory.
    let (key, block) = (BlockKey([7; 32]), BlockId(0));
    if store.load(&[key], &[block])? == [true] {
        println!("found: {:#x}", store.read(block)?[0]);
    } else {
        store.write(block, &vec![0xAB; shape.block_bytes() as usize])?;
        store.save(&[key], &[block])?;
        println!("stored; run it again");
    }
    Ok(store.close()?)
}
