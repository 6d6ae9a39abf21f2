//! Report of `ripieno format`, for people and programs.

use std::path::{Path, PathBuf};

use kv_catalog::Superblock;
use objstore::{Format, Overwrite};
use ripieno_stack::Held;
use serde_json::json;

use super::FormatFlags;
use crate::size::{Size, grouped};
use crate::table::{row, table};
use crate::terminal::print;

/// The data that is written, and the data that it destroys.
#[derive(Debug)]
pub(super) struct Report {
    store: String,
    /// The first device's superblock; `None` if the devices are not created yet.
    superblock: Option<Superblock>,
    /// Contents of the devices, in order.
    pub(super) held: Vec<Held>,
    /// File that the overwritten data is saved in.
    pub(super) undo_file: Option<PathBuf>,
}

impl Report {
    pub(super) fn new(superblocks: &[Superblock], held: Vec<Held>) -> Self {
        let superblock = superblocks.first().cloned();
        let store = superblock.as_ref().map(|found| found.store.to_string()).unwrap_or_default();
        Self { store, superblock, held, undo_file: None }
    }

    /// Returns the report for files that do not exist yet.
    pub(super) fn of_files(dir: &Path, count: u32, bytes: u64, format: &Format) -> Self {
        let file = |at| Held {
            device: dir.join(format!("device-{at}.img")).display().to_string(),
            identity: "a file that would be made".to_owned(),
            bytes: bytes / u64::from(count),
            what: "nothing".to_owned(),
            loss: Overwrite::Nothing,
            store: None,
        };
        let held = (0..count).map(file).collect();
        Self { store: format.store.to_string(), superblock: None, held, undo_file: None }
    }

    /// Prints a table, or one JSON object.
    pub(super) fn print(&self, flags: &FormatFlags) -> anyhow::Result<()> {
        if flags.json {
            print(self.to_json(flags.dry_run))
        } else {
            print(self.text(flags.dry_run))
        }
    }

    fn to_json(&self, dry_run: bool) -> serde_json::Value {
        let superblock = self.superblock.as_ref();
        let data = superblock.and_then(|found| found.data);
        let journal = superblock.and_then(|found| found.journal);
        let devices = self.held.iter().map(|held| {
            json!({
                "device": held.device,
                "identity": held.identity,
                "region_bytes": held.bytes,
                "held": held.what,
            })
        });
        json!({
            "store": self.store,
            "dry_run": dry_run,
            "files": superblock.map(|found| found.layout.files),
            "checksums_a_file": superblock.map(|found| found.layout.words_per_file),
            "journal_offset": journal.map(|area| area.offset),
            "journal_bytes": journal.map(|area| 2 * area.half_bytes),
            "data_offset": data.map(|data| data.offset),
            "data_bytes": data.map(|data| data.bytes),
            "devices": devices.collect::<Vec<_>>(),
            "undo_file": self.undo_file.as_ref().map(|path| path.display().to_string()),
        })
    }

    fn text(&self, dry_run: bool) -> String {
        let mut rows = Vec::new();
        if let Some(found) = &self.superblock {
            let note = match found.layout.words_per_file {
                0 => "without checksums".to_owned(),
                words => format!("{words} checksums each"),
            };
            rows.push(row("files", grouped(found.layout.files.into()), note));
            rows.push(row("superblock", "2 x 8 KiB", "at 0 and at 512 KiB of each device"));
            if let Some(area) = found.journal {
                let note = format!("at {} of the first device", Size(area.offset));
                rows.push(row("journal", format!("2 x {}", Size(area.half_bytes)), note));
            }
            if let Some(data) = found.data {
                let note = format!("at {} of each device", Size(data.offset));
                rows.push(row("data", Size(data.bytes), note));
            }
        }
        for (at, held) in self.held.iter().enumerate() {
            let Held { device, identity, bytes, what, .. } = held;
            let verb = if dry_run { "holds" } else { "held" };
            let note = format!("{device}\n{identity}\nit {verb} {what}");
            rows.push(row(&format!("device {at}"), Size(*bytes), note));
        }
        let end = match (&self.undo_file, dry_run) {
            (Some(path), _) => {
                let path = path.display();
                format!("\nripieno format --undo {path}, with the same devices, brings it back")
            }
            (None, true) => "\nNothing was written.".to_owned(),
            (None, false) => String::new(),
        };
        let store = row("store", if dry_run { "to be made" } else { "made" }, &self.store);
        rows.insert(0, store);
        table(&rows) + &end
    }
}

/// Prints how much was restored.
pub(super) fn print_undone(json: bool, path: &Path, bytes: u64) -> anyhow::Result<()> {
    let path = path.display();
    if json {
        return print(json!({ "undo_file": path.to_string(), "bytes_put_back": bytes }));
    }
    print(format_args!("{} were put back as {path} has them", Size(bytes)))
}
