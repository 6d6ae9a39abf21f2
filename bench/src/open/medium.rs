//! Memory or a file as the medium of a journal.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result};
use kv_catalog::{BlockAction, BlockError, BlockIo};
use rustix::fs::{Advice, fadvise};

/// A handle; clones share one medium.
#[derive(Clone)]
pub struct Medium {
    bytes: u64,
    store: Store,
}

#[derive(Clone)]
enum Store {
    Memory(Arc<Mutex<Vec<u8>>>),
    File(Arc<File>),
}

impl Medium {
    /// Returns a medium in memory, which allocates pages as they are written.
    pub fn memory(bytes: u64) -> Self {
        Self { bytes, store: Store::Memory(Arc::new(Mutex::new(vec![0; bytes as usize]))) }
    }

    /// Returns a medium in an unlinked sparse file in `dir`.
    pub fn file(dir: &Path, bytes: u64) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let path = dir.join("open.img");
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.with_context(|| format!("making {}", path.display()))?;
        std::fs::remove_file(&path)?;
        file.set_len(bytes)?;
        Ok(Self { bytes, store: Store::File(Arc::new(file)) })
    }

    /// Drops a file from the page cache.
    pub fn forget(&self) -> Result<()> {
        if let Store::File(file) = &self.store {
            file.sync_all()?;
            fadvise(file, 0, None, Advice::DontNeed)?;
        }
        Ok(())
    }

    fn error(&self, action: BlockAction, at: (u64, usize), error: &std::io::Error) -> BlockError {
        let (device, reason) = (self.name().to_owned(), error.to_string());
        BlockError { device, action, offset: at.0, bytes: at.1 as u64, reason }
    }
}

impl BlockIo for Medium {
    fn name(&self) -> &str {
        match self.store {
            Store::Memory(_) => "memory",
            Store::File(_) => "file",
        }
    }

    fn lba_bytes(&self) -> u32 {
        4096
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        match &self.store {
            Store::Memory(bytes) => {
                let bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
                into.copy_from_slice(&bytes[offset as usize..][..into.len()]);
                Ok(())
            }
            Store::File(file) => {
                let at = (offset, into.len());
                let read = file.read_exact_at(into, offset);
                read.map_err(|error| self.error(BlockAction::Read, at, &error))
            }
        }
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        match &self.store {
            Store::Memory(bytes) => {
                let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
                bytes[offset as usize..][..from.len()].copy_from_slice(from);
                Ok(())
            }
            Store::File(file) => {
                let written = file.write_all_at(from, offset);
                let synced = written.and_then(|()| if fua { file.sync_data() } else { Ok(()) });
                let at = (offset, from.len());
                synced.map_err(|error| self.error(BlockAction::Write, at, &error))
            }
        }
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        match &self.store {
            Store::Memory(_) => Ok(()),
            Store::File(file) => {
                file.sync_data().map_err(|error| self.error(BlockAction::Flush, (0, 0), &error))
            }
        }
    }
}
