//! Store directories that keep a store after the command ends.

use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{StoreDir, StoreDirMedia, StoreDirOptions};

use crate::config::StoreArgs;
use crate::problem::Problem;
use crate::sizing::Sizing;

/// Sizes of a store directory's files are rounded up to a multiple of this.
const UNIT: u64 = 1 << 20;

/// Opens the store directory that is to be kept, if there is one.
pub(crate) fn find(args: &StoreArgs) -> Result<Option<StoreDir>, Problem> {
    let dir = args.devices.emu().and_then(|emu| emu.dir()).filter(|_| args.flags.keep);
    let opened = dir.filter(|dir| StoreDir::exists(dir)).map(StoreDir::open);
    opened.transpose().map_err(|error| Problem::new(error.to_string(), ""))
}

/// Creates the store directory that is to be kept.
pub(crate) fn make(args: &StoreArgs, sizing: &Sizing) -> Result<Option<StoreDir>, Problem> {
    let emu = args.devices.emu().filter(|_| args.flags.keep);
    let Some((emu, dir)) = emu.and_then(|emu| Some((emu, emu.dir()?))) else {
        return Ok(None);
    };
    let options = in_files(emu.count, sizing.device_bytes, emu.lba_bytes);
    let made = StoreDir::create(dir, &options);
    made.map(Some).map_err(|error| Problem::new(error.to_string(), ""))
}

/// Returns the options of a new store directory with `count` files of `device_bytes`, rounded up.
pub(crate) fn in_files(count: u32, device_bytes: u64, lba_bytes: u32) -> StoreDirOptions {
    let bytes = device_bytes.next_multiple_of(UNIT).saturating_mul(count.into());
    let media = StoreDirMedia::Files { count, bytes };
    StoreDirOptions { id: OsRng.unwrap_err().random(), media, lba_bytes }
}
