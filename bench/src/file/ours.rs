//! Our side: a store in files.

use std::{path::Path, time::Instant};

use anyhow::{Context as _, Result, ensure};
use objstore::{BlockId, Durability, Format, KvShape, StoreOptions};

use ripieno_stack::{Executor, StoreDir, StoreDirMedia, StoreDirOptions};

use super::{Direction, LAYERS, Load, Pass};
use crate::{
    sample::process_cpu,
    stack::{Stack, scattered},
};

/// A filled store, and the blocks of its pool in scattered order.
pub struct Ours {
    stack: Stack,
    blocks: Vec<BlockId>,
}

impl Ours {
    /// Creates a store in `folder`/`name`, of this executor.
    pub fn new(
        folder: &Path,
        name: &str,
        load: &Load<'_>,
        checksums: bool,
        executor: Executor,
    ) -> Result<Self> {
        let shape = KvShape {
            layers: LAYERS,
            segments: 1,
            object_bytes: load.object_bytes,
            block_tokens: 16,
        };
        // Room for whole groups of the layout.
        let bytes = (load.bytes() * 2 / u64::from(load.args.devices)).max(64 << 20);
        let bytes = bytes * u64::from(load.args.devices);
        let media = StoreDirMedia::Files { count: load.args.devices, bytes };
        let dir = StoreDirOptions { id: 1, media, lba_bytes: 4096 };
        let dir = StoreDir::create(&folder.join(name), &dir).context("making its directory")?;
        let options = StoreOptions {
            // As many reads or writes in the kernel as fio has.
            depth: load.args.depth.next_power_of_two(),
            // One command per object, as fio has one per block.
            run_bytes: load.object_bytes,
            // No flushes, as with fio's defaults.
            durability: Durability::Volatile,
            // As a store in a directory. fio overwrites its file; holes would be allocated again.
            deallocate: false,
            ..StoreOptions::default()
        };
        let format = Format { checksums, ..ripieno_testkit::format(shape) };
        let stack = Stack::over(dir, &options, &format, load.blocks(), Some(executor), None)?;
        Ok(Self { stack, blocks: scattered(load.blocks()) })
    }

    /// Moves all layers of all blocks once.
    pub fn pass(&mut self, direction: Direction) -> Result<Pass> {
        match direction {
            Direction::Read => self.retrieve(),
            Direction::Write => self.store(),
        }
    }

    fn retrieve(&mut self) -> Result<Pass> {
        let stack = &self.stack;
        let load = stack.store.retrieve(&stack.prefix()?, &self.blocks)?;
        measured(|| Ok(stack.store.move_all(&load)?))
    }

    /// Stores the same blocks again, into allocated extents, as with fio.
    fn store(&mut self) -> Result<Pass> {
        let (stack, store) = (&self.stack, &self.stack.store);
        store.remove(&stack.keys)?;
        let save = store.allocate(&stack.keys, &self.blocks)?;
        ensure!(save.written() == self.blocks.len(), "the store is too small");
        let pass = measured(|| Ok(store.move_all(&save)?))?;
        store.commit(save)?;
        Ok(pass)
    }
}

fn measured(work: impl FnOnce() -> Result<u64>) -> Result<Pass> {
    let (start, cpu) = (Instant::now(), process_cpu());
    let bytes = work()?;
    let (seconds, cpu_seconds) =
        (start.elapsed().as_secs_f64(), (process_cpu() - cpu).as_secs_f64());
    Ok(Pass { bytes, seconds, cpu_seconds })
}
