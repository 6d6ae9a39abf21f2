//! `ripieno format`: makes a store, and can undo that.

mod report;
mod undo;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use kv_catalog::{FormatError, Superblock};
use objstore::{Format, KvShape, Overwrite, Store, StoreDevice, StoreError, StoreId};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{
    Held, PoolMemory, StoreDir, StoreDirMedia, StoreDirOptions, clear_edges, expand_home,
};

use crate::devices;
use crate::drives;
use crate::interrupt::Interrupt;
use crate::keep;
use crate::machine;
use crate::model::{self, Model, Shape};
use crate::offline;
use crate::options::{StoreFlags, Takes};
use crate::problem::{Problem, user_error};
use crate::size::{self, Size};
use report::{Report, print_undone};

/// Flags of `ripieno format`.
#[derive(Debug, Args)]
pub(crate) struct FormatFlags {
    #[command(flatten)]
    options: StoreFlags<Self>,

    /// Model that gives the shape of the KV cache: tiny, mini, llama-3-8b, qwen3-32b or
    /// deepseek-v3-mla
    #[arg(long, value_name = "NAME", default_value = model::DEFAULT, value_parser = model::named)]
    model: &'static Model,

    /// Tokens per block, a divisor of 512 [default: 512 for tiny, else 64]
    #[arg(long, value_name = "N", value_parser = size::count::<u32>(0..=u64::from(u32::MAX)))]
    block_tokens: Option<u32>,

    /// Shape of a block instead of a model's, as in a server's configuration: layers, segments,
    /// bytes of an object, tokens
    #[arg(long, value_name = "L,S,B,T", value_parser = model::shape,
        conflicts_with_all = ["block_tokens", "model"])]
    shape: Option<KvShape>,

    /// Keep no object checksums: corrupted data is not detected then
    #[arg(long)]
    no_checksums: bool,

    /// Block devices of a new store directory instead of files; best by their names in
    /// /dev/disk/by-id. May be repeated
    #[arg(long, value_name = "PATH", conflicts_with = "devices")]
    block: Vec<PathBuf>,

    /// Only show what would be written and lost
    #[arg(long)]
    dry_run: bool,

    /// File for the overwritten data [default: ripieno-undo-STORE in this directory]
    #[arg(long, value_name = "PATH")]
    undo_file: Option<PathBuf>,

    /// Do not save overwritten data
    #[arg(long, conflicts_with = "undo_file")]
    no_undo: bool,

    /// Restore what formatting overwrote, as long as the new store was never opened
    #[arg(long, value_name = "PATH", conflicts_with_all = ["overwrite", "dry_run", "capacity"])]
    undo: Option<PathBuf>,

    /// Print one JSON object on stdout instead of the table
    #[arg(long)]
    json: bool,
}

impl Takes for FormatFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] = &[
        ("path", ""),
        ("devices", "2 for new files"),
        ("capacity", "all that fits; required for new files"),
        ("lba", "512 for tiny, else 4096"),
        ("codec", ""),
        ("overwrite", ""),
    ];
}

/// Formats, or shows what that would do, or undoes it. Returns the exit code.
pub(crate) fn run(flags: &FormatFlags) -> anyhow::Result<u8> {
    let _interrupt = Interrupt::listen().context("listening for signals")?;
    let config = &flags.options.config;
    config.check(&PoolMemory::Own { blocks: 0 }).map_err(user_error)?;
    if let Some(path) = &flags.undo {
        let devices = offline::open(config)?;
        drives::check_unowned(devices.attached())?;
        let bytes = undo::put_back(path, devices.attached())?;
        devices.shut_down().map_err(user_error)?;
        print_undone(flags.json, path, bytes)?;
        return Ok(0);
    }
    let of_model =
        || Shape::new(flags.model, flags.block_tokens.unwrap_or(flags.model.block_tokens));
    let shape = flags.shape.map_or_else(|| of_model().map(|shape| *shape), Ok)?;
    let format = Format {
        codec: config.codec.unwrap_or_default(),
        capacity_bytes: config.capacity,
        checksums: !flags.no_checksums,
        // `allow` checks what may be lost, including data outside the store's region.
        overwrite: Overwrite::Anything,
        ..Format::new(StoreId(OsRng.unwrap_err().random()), shape)
    };
    let new = config.files().is_some() || config.lba.is_some() || !flags.block.is_empty();
    let mut devices = match config.path.as_deref() {
        Some(dir) if !StoreDir::exists(dir) => {
            let parent = check_parent(dir)?;
            let options = new_store_dir(flags, &format)?;
            if let (true, StoreDirMedia::Files { count, bytes }) = (flags.dry_run, &options.media) {
                let at = if dir.is_dir() { dir } else { &parent };
                machine::check_disk(dir, at, *bytes, "give a smaller --capacity")?;
                Report::of_files(dir, *count, *bytes, &format).print(flags)?;
                return Ok(0);
            }
            offline::attach(StoreDir::create(dir, &options).map_err(in_the_way)?)?
        }
        _ if new => {
            let hint = "leave out --devices, --block and --lba, or name an empty directory";
            bail!(Problem::new("devices that are there keep their number and LBA size", hint));
        }
        _ => offline::open(config)?,
    };
    // A store directory that was created here is removed again if it does not get a store.
    let written = write(flags, &format, devices.attached());
    let mut closed = devices.shut_down();
    if written.is_ok() && !flags.dry_run {
        closed = closed.and_then(|()| devices.set_ready());
    }
    written?.print(flags)?;
    closed.map(|()| 0).map_err(user_error)
}

/// Writes the store after all checks have passed.
fn write(flags: &FormatFlags, format: &Format, devices: &[StoreDevice]) -> anyhow::Result<Report> {
    let held = Held::on(devices).map_err(user_error)?;
    let superblocks = Store::plan(devices, format).map_err(refused)?;
    check_room(format, &superblocks)?;
    let mut report = Report::new(&superblocks, held);
    if flags.dry_run {
        // The table and the exit code both show what prevents formatting.
        if let Err(problem) = allow(flags, &report.held) {
            report.print(flags)?;
            return Err(problem.into());
        }
        return Ok(report);
    }
    allow(flags, &report.held)?;
    if !flags.no_undo && report.held.iter().any(|held| held.loss > Overwrite::Nothing) {
        let default = || PathBuf::from(format!("ripieno-undo-{}", format.store));
        let path = flags.undo_file.clone().unwrap_or_else(default);
        undo::save(&path, format.store, devices).map_err(|error| not_saved(&path, &error))?;
        report.undo_file = Some(path);
    }
    clear_edges(devices).map_err(user_error)?;
    Store::format(devices, format).map_err(refused)?;
    Ok(report)
}

/// Rejects a store that is smaller than was asked for: existing devices have a fixed size.
fn check_room(format: &Format, superblocks: &[Superblock]) -> Result<(), Problem> {
    let Some((asked, first)) = format.capacity_bytes.zip(superblocks.first()) else {
        return Ok(());
    };
    let Some(data) = first.data else { return Ok(()) };
    let file_bytes = u64::from(data.slot_bytes) * u64::from(format.shape.rows());
    let room = u64::from(first.layout.files) * file_bytes;
    if asked < room + file_bytes {
        return Ok(());
    }
    let [asked, room] = [asked, room].map(Size);
    Err(Problem::new(
        format!("--capacity {asked}: the devices have room for {room} of objects"),
        "leave it out to use all of that; a store directory changes its size only by being removed \
         and made again",
    ))
}

fn not_saved(path: &Path, error: &anyhow::Error) -> Problem {
    let message = format!("saving what is overwritten to {}: {error:#}", path.display());
    Problem::new(message, "nothing was formatted; name another --undo-file, or say --no-undo")
}

/// Rejects the loss of data that the user did not name.
fn allow(flags: &FormatFlags, held: &[Held]) -> Result<(), Problem> {
    let allowed = flags.options.config.overwrite.unwrap_or_default();
    let Some(found) = held.iter().find(|held| held.loss > allowed) else { return Ok(()) };
    let (Held { device, what, .. }, word) = (found, found.overwrite());
    Err(Problem::new(
        format!("{device}: it holds {what}, and formatting would destroy that"),
        format!("name another device; or say --overwrite {word} if it is not needed"),
    ))
}

/// Returns the directory that `dir` will be in; without one, `dir` cannot be made.
fn check_parent(dir: &Path) -> Result<PathBuf, Problem> {
    let dir = expand_home(dir);
    // An empty parent is the working directory.
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    if parent.is_dir() {
        return Ok(parent.to_owned());
    }
    Err(Problem::new(
        format!("--path {}: the directory that it would be in is not there", dir.display()),
        "make that, or name another one that you may write to",
    ))
}

fn new_store_dir(flags: &FormatFlags, format: &Format) -> anyhow::Result<StoreDirOptions> {
    let lba_bytes = flags.options.config.lba.unwrap_or(flags.model.lba_bytes);
    if !flags.block.is_empty() {
        let id = OsRng.unwrap_err().random();
        let media = StoreDirMedia::BlockDevices(flags.block.clone());
        return Ok(StoreDirOptions { id, media, lba_bytes });
    }
    if flags.undo_file.is_some() {
        let hint = "leave out --undo-file; removing the directory removes the store";
        bail!(Problem::new("a new store directory overwrites nothing that could be saved", hint));
    }
    if flags.options.config.capacity.is_none() {
        let hint = "say --capacity 10GiB, or as much as you want";
        bail!(Problem::new("a new store in files needs a size", hint));
    }
    let count = flags.options.config.files().unwrap_or(devices::EMU_DEFAULT);
    let each = Store::device_bytes(format, count, lba_bytes).map_err(refused)?;
    Ok(keep::in_files(count, each, lba_bytes))
}

fn in_the_way(error: impl std::fmt::Display) -> Problem {
    Problem::new(error.to_string(), "")
}

/// Turns sizes that do not fit into user errors; device errors stay as they are.
fn refused(error: StoreError) -> anyhow::Error {
    match error {
        StoreError::Format(FormatError::Block(_)) => error.into(),
        StoreError::Format(_) | StoreError::Config { .. } | StoreError::Owned { .. } => {
            in_the_way(error).into()
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests;
