//! A medium for tests that can lose power and misbehave.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use super::{BlockAction, BlockError, BlockIo};

/// Power loss never tears a sector.
const SECTOR: usize = 512;

/// Faults to inject, each at the given number of the write or flush since [`Medium::plan`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Power is lost during this one.
    pub power_loss: Option<u64>,
    /// This one fails, and its data is treated as in a power loss.
    pub fail: Option<u64>,
    /// This write is acknowledged, but not carried out.
    pub lost: Option<u64>,
    /// This write goes to another offset: (number, offset).
    pub misdirected: Option<(u64, u64)>,
    /// Reads that contain this byte fail.
    pub unreadable: Option<u64>,
}

type Sectors = BTreeMap<usize, [u8; SECTOR]>;

struct State {
    name: String,
    lba_bytes: u32,
    permanent: Vec<u8>,
    /// Unflushed writes, the oldest first.
    cache: Vec<Sectors>,
    faults: Faults,
    /// Offset of each write since the faults were set; `None` for a flush.
    done: Vec<Option<u64>>,
    written_bytes: u64,
    is_off: bool,
}

/// A handle; its clones share one medium.
#[derive(Clone)]
pub(crate) struct Medium {
    name: String,
    lba_bytes: u32,
    bytes: u64,
    state: Arc<Mutex<State>>,
}

impl Medium {
    pub fn new(name: &str, bytes: u64, lba_bytes: u32) -> Self {
        let state = State {
            name: name.to_owned(),
            lba_bytes,
            permanent: vec![0; bytes as usize],
            cache: Vec::new(),
            faults: Faults::default(),
            done: Vec::new(),
            written_bytes: 0,
            is_off: false,
        };
        Self { name: name.to_owned(), lba_bytes, bytes, state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics with it")
    }

    /// Returns another medium with the same durable contents.
    pub fn copy(&self) -> Self {
        let other = Self::new(&self.name, self.bytes, self.lba_bytes);
        other.state().permanent.clone_from(&self.state().permanent);
        other
    }

    /// Sets the faults to inject from now on.
    pub fn plan(&self, faults: Faults) {
        let mut state = self.state();
        (state.faults, state.done, state.written_bytes) = (faults, Vec::new(), 0);
    }

    /// Returns the offsets of the writes since [`Medium::plan`], and `None` for each flush.
    pub fn done(&self) -> Vec<Option<u64>> {
        self.state().done.clone()
    }

    /// Returns the bytes written since [`Medium::plan`].
    pub fn written_bytes(&self) -> u64 {
        self.state().written_bytes
    }

    /// Restores power. Each unflushed write was kept, dropped or torn, chosen by `choose`, which
    /// returns a number below its argument.
    pub fn restart(&self, choose: &mut dyn FnMut(u32) -> u32) {
        let mut state = self.state();
        for write in std::mem::take(&mut state.cache) {
            let fate = choose(3);
            for (sector, bytes) in write {
                if fate == 0 || (fate == 1 && choose(2) == 0) {
                    state.permanent[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
                }
            }
        }
        (state.faults, state.is_off) = (Faults::default(), false);
    }

    /// Changes durable bytes behind the store's back.
    pub fn corrupt(&self, offset: u64, change: impl FnOnce(&mut [u8])) {
        change(&mut self.state().permanent[offset as usize..]);
    }
}

impl State {
    fn error(&self, action: BlockAction, offset: u64, bytes: usize) -> BlockError {
        let device = self.name.clone();
        let reason = "simulated".into();
        BlockError { device, action, offset, bytes: bytes as u64, reason }
    }

    fn check(&self, offset: u64, bytes: usize) {
        let lba = u64::from(self.lba_bytes);
        assert!(offset.is_multiple_of(lba) && (bytes as u64).is_multiple_of(lba), "alignment");
        assert!(offset + bytes as u64 <= self.permanent.len() as u64, "inside the region");
    }

    fn flush(&mut self) {
        for write in std::mem::take(&mut self.cache) {
            for (sector, bytes) in write {
                self.permanent[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
            }
        }
    }
}

impl BlockIo for Medium {
    fn name(&self) -> &str {
        &self.name
    }

    fn lba_bytes(&self) -> u32 {
        self.lba_bytes
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        let state = self.state();
        state.check(offset, into.len());
        let range = offset..offset + into.len() as u64;
        if state.is_off || state.faults.unreadable.is_some_and(|byte| range.contains(&byte)) {
            return Err(state.error(BlockAction::Read, offset, into.len()));
        }
        into.copy_from_slice(&state.permanent[offset as usize..][..into.len()]);
        let first = offset as usize / SECTOR;
        let range = first..first + into.len() / SECTOR;
        for write in &state.cache {
            for (sector, bytes) in write.range(range.clone()) {
                into[(sector - first) * SECTOR..][..SECTOR].copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        let mut state = self.state();
        state.check(offset, from.len());
        let (faults, number) = (state.faults, Some(state.done.len() as u64));
        state.done.push(Some(offset));
        state.written_bytes += from.len() as u64;
        if state.is_off {
            return Err(state.error(BlockAction::Write, offset, from.len()));
        }
        if faults.lost == number {
            return Ok(());
        }
        let offset = match faults.misdirected {
            Some((at, elsewhere)) if Some(at) == number => {
                elsewhere.min(self.bytes - from.len() as u64)
            }
            _ => offset,
        };
        let first = offset as usize / SECTOR;
        let sectors = from.chunks_exact(SECTOR).map(|bytes| bytes.try_into().expect("a sector"));
        let sectors: Sectors = (first..).zip(sectors).collect();
        let fails = faults.power_loss == number || faults.fail == number;
        if fua && !fails {
            state.permanent[offset as usize..][..from.len()].copy_from_slice(from);
            for write in &mut state.cache {
                write.retain(|sector, _| !sectors.contains_key(sector));
            }
            return Ok(());
        }
        state.cache.push(sectors);
        state.is_off = faults.power_loss == number;
        if fails { Err(state.error(BlockAction::Write, offset, from.len())) } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        let mut state = self.state();
        let (faults, number) = (state.faults, Some(state.done.len() as u64));
        state.done.push(None);
        state.is_off |= faults.power_loss == number;
        if state.is_off || faults.fail == number {
            return Err(state.error(BlockAction::Flush, 0, 0));
        }
        state.flush();
        Ok(())
    }
}
