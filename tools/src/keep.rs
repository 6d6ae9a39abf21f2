//! `--keep`: the store directory or drives that keep a store after the command ends, and whether it
//! existed.

use anyhow::bail;
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{Drives, StoreDir, StoreDirMedia, StoreDirOptions};

use crate::config::StoreArgs;
use crate::drives;
use crate::problem::{Problem, user_error};
use crate::size::Size;
use crate::sizing::Sizing;

/// Sizes of a store directory's files are rounded up to a multiple of this.
const UNIT: u64 = 1 << 20;

/// Location of the kept store.
#[derive(Debug)]
pub(crate) struct Keep {
    /// `None` until it is created, and for drives.
    store_dir: Option<StoreDir>,
    found: bool,
}

impl Keep {
    /// Opens an existing store directory. Drives are claimed later.
    pub(crate) fn find(args: &StoreArgs) -> Result<Self, Problem> {
        let dir = args.devices.emu().and_then(|emu| emu.dir.as_ref());
        let store_dir = dir.filter(|dir| StoreDir::exists(dir)).map(|dir| StoreDir::open(dir));
        let store_dir =
            store_dir.transpose().map_err(|error| Problem::new(error.to_string(), ""))?;
        Ok(Self { found: store_dir.is_some(), store_dir })
    }

    /// Creates the store directory if there is none.
    pub(crate) fn make(&mut self, args: &StoreArgs, sizing: &Sizing) -> Result<(), Problem> {
        let emu = args.devices.emu().filter(|_| self.store_dir.is_none());
        if let Some((emu, dir)) = emu.and_then(|emu| Some((emu, emu.dir.as_ref()?))) {
            let options = in_files(emu.count, sizing.device_bytes, emu.lba_bytes);
            let created = StoreDir::create(dir, &options);
            self.store_dir = Some(created.map_err(|error| Problem::new(error.to_string(), ""))?);
        }
        Ok(())
    }

    /// Looks for the store on the drives, and prepares them for a new one if there is none.
    pub(crate) fn claim(
        &mut self,
        drives: &mut Drives,
        args: &StoreArgs,
        sizing: &Sizing,
    ) -> anyhow::Result<()> {
        self.found = drives::hold_store(drives, args.config.overwrite.unwrap_or_default())?;
        if !self.found {
            drives::check_room(drives, sizing.device_bytes)?;
            drives.check_unowned().map_err(user_error)?;
            drives.clear_edges().map_err(user_error)?;
        }
        Ok(())
    }

    /// Returns the store directory; `None` for drives.
    pub(crate) fn store_dir(&self) -> Option<&StoreDir> {
        self.store_dir.as_ref()
    }

    /// Returns true if the store existed before.
    pub(crate) fn is_found(&self) -> bool {
        self.found
    }

    /// Records that the store is open, with room for `files` files, and marks a new store directory
    /// as ready.
    pub(crate) fn opened(
        &mut self,
        args: &StoreArgs,
        asked: &Sizing,
        files: u32,
    ) -> anyhow::Result<Sizing> {
        let mut sizing = *asked;
        sizing.files = files;
        if self.found && args.config.capacity.is_some() && files != asked.files {
            let (found, asked) = (Size(sizing.capacity_bytes()), Size(asked.capacity_bytes()));
            bail!(Problem::new(
                format!("--capacity: the store was made with {found} for objects, and not {asked}"),
                "leave it out; a store keeps its size until it is formatted again",
            ));
        }
        if let (false, Some(store_dir)) = (self.found, &mut self.store_dir) {
            store_dir.set_ready()?;
        }
        Ok(sizing)
    }
}

/// Returns the options of a new store directory with `count` files of `device_bytes`, rounded up.
pub(crate) fn in_files(count: u32, device_bytes: u64, lba_bytes: u32) -> StoreDirOptions {
    let bytes = device_bytes.next_multiple_of(UNIT).saturating_mul(count.into());
    let media = StoreDirMedia::Files { count, bytes };
    StoreDirOptions { id: OsRng.unwrap_err().random(), media, lba_bytes }
}
