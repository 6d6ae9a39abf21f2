//! `ripieno inspect` and `ripieno fsck`: show a store's on-disk state and check it for damage.

use clap::Args;
use kv_catalog::{JournalScan, RecordCounts};
use objstore::{Medium, Salvage, Store};
use ripieno_stack::Devices;
use serde_json::json;

use crate::options::{StoreFlags, Takes};
use crate::problem::{EXIT_FAILED, user_error};
use crate::progress::Progress;
use crate::salvage;
use crate::size::{Size, grouped};
use crate::survey::{DeviceView, Survey};
use crate::table::{row, table};
use crate::terminal::{print, say};
use crate::{drives, offline};

/// Flags of `ripieno inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectFlags {
    #[command(flatten)]
    options: StoreFlags<Self>,

    /// Print one JSON object on stdout instead of the tables
    #[arg(long)]
    json: bool,
}

impl Takes for InspectFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] =
        &[("path", ""), ("devices", "those of path")];
}

/// Flags of `ripieno fsck`.
#[derive(Debug, Args)]
pub(crate) struct FsckFlags {
    #[command(flatten)]
    inspect: InspectFlags,

    /// Rewrite a damaged superblock copy from the other one, and replace a damaged journal by an
    /// empty one: all keys are lost then, and the data is not touched. The plan is printed first
    #[arg(long)]
    repair: bool,

    /// Read all data of a store with a damaged journal, and list the blocks that can be kept: those
    /// whose checksums match a record. With --repair, they are kept
    #[arg(long)]
    salvage: bool,
}

/// Shows the devices' contents. Returns the exit code.
pub(crate) fn run(flags: &InspectFlags) -> anyhow::Result<u8> {
    let devices = offline::examine(&flags.options.config, false)?;
    let owner = Store::living_owner(devices.attached())?.map(|(_, owner)| owner.to_string());
    let survey = Survey::take(&mut Store::media(devices.attached())?, |_, _| {})?;
    let survey = Survey { owner, ..survey };
    devices.shut_down().map_err(user_error)?;
    if flags.json {
        print(to_json(&survey))?;
    } else {
        print(text(&survey))?;
    }
    Ok(0)
}

/// Checks everything but the data, and repairs it if asked to. Returns the exit code.
pub(crate) fn check(flags: &FsckFlags) -> anyhow::Result<u8> {
    check_devices(flags, &offline::examine(&flags.inspect.options.config, flags.repair)?, |media| {
        let progress = Progress::bytes("read", 0, !flags.inspect.json);
        let survey = Survey::take(media, |done, all| progress.read(done, all))?;
        progress.finish();
        Ok(survey)
    })
}

/// Checks and repairs attached devices, which `read` reads.
fn check_devices(
    flags: &FsckFlags,
    devices: &Devices,
    read: impl FnOnce(&mut [Medium]) -> anyhow::Result<Survey>,
) -> anyhow::Result<u8> {
    let attached = devices.attached();
    if flags.repair {
        drives::check_unowned(attached)?;
    }
    let owner = Store::living_owner(attached)?.map(|(_, owner)| owner.to_string());
    if let Some(owner) = &owner {
        say(format_args!("the store is open, and changes while it is read: {owner}"));
    }
    let mut media = Store::media(attached)?;
    let mut survey = read(&mut media)?;
    let is_damaged = survey.journal.as_ref().is_some_and(|journal| journal.damage.is_some());
    let (mut salvage, mut findings, mut repaired) = (None, None, Vec::new());
    if flags.salvage && is_damaged {
        let config = &flags.inspect.options.config;
        let found = salvage::find(&survey, &mut media, config, flags.inspect.json)?;
        (salvage, findings) = (Some(found.0), Some(found.1));
    }
    if flags.repair && !survey.damage.is_empty() {
        repaired = repairs(&survey, salvage.as_ref());
        repaired.iter().for_each(|what| say(format_args!("repairing: {what}")));
        // Reading may have taken hours.
        drives::check_unowned(attached)?;
        repair(&survey, &mut media, salvage)?;
        survey = Survey::take(&mut media, |_, _| {})?;
    }
    drop(media);
    devices.shut_down().map_err(user_error)?;
    let damage = &survey.damage;
    if flags.inspect.json {
        print(json!({
            "damage": damage,
            "owner": owner,
            "repaired": repaired,
            "salvage": findings.map(|findings| findings.json),
            "stored_files": survey.stored_files,
        }))?;
        return Ok(if damage.is_empty() { 0 } else { EXIT_FAILED });
    }
    if let Some(findings) = &findings {
        print(&findings.text)?;
    }
    if damage.is_empty() {
        print(format_args!("clean: {} blocks are stored", grouped(survey.stored_files.into())))?;
    } else {
        print(format_args!("damaged:\n  {}", damage.join("\n  ")))?;
        for what in repairs(&survey, None) {
            say(format_args!(" hint: --repair rewrites {what}"));
        }
        if findings.as_ref().is_some_and(|found| found.kept > 0) {
            say(format_args!(" hint: add --repair to keep these blocks; nothing was changed"));
        }
    }
    Ok(if damage.is_empty() { 0 } else { EXIT_FAILED })
}

/// Describes the possible repairs.
fn repairs(survey: &Survey, salvage: Option<&Salvage>) -> Vec<String> {
    let copy = |device: &DeviceView| {
        let lost = device.lost_copy?;
        Some(format!("{}: copy {lost} of the superblock, from the other one", device.device))
    };
    let mut repairs: Vec<String> = survey.devices.iter().filter_map(copy).collect();
    if let Some(salvage) = salvage {
        let kept = grouped(salvage.kept().into());
        repairs.push(format!("the journal, with the {kept} blocks that can be kept"));
    } else if survey.can_be_emptied() {
        repairs.push(format!(
            "the journal, by making it empty: all keys are lost, {} that can be read and those \
             behind the damage; the data is not touched",
            grouped(survey.stored_files.into())
        ));
    }
    repairs
}

fn repair(
    survey: &Survey,
    media: &mut [Medium],
    mut salvage: Option<Salvage>,
) -> anyhow::Result<()> {
    for (device, medium) in survey.devices.iter().zip(media) {
        let Some(mut superblock) = device.superblock.clone() else { continue };
        if let Some(lost) = device.lost_copy {
            superblock.write_copy(&mut *medium.io, lost)?;
        }
        if superblock.journal.is_none() {
            continue;
        }
        if let Some(salvage) = salvage.take() {
            salvage.write(medium)?;
        } else if survey.can_be_emptied() {
            kv_catalog::rewrite_journal(&mut *medium.io, &mut superblock, |_| false)?;
        }
    }
    Ok(())
}

/// Describes the store that the first device with a superblock belongs to.
fn to_json(survey: &Survey) -> serde_json::Value {
    let store = survey.devices.iter().find_map(|device| device.superblock.as_ref());
    let store = store.map(|superblock| {
        let shape = superblock.layout.shape;
        json!({
            "id": superblock.store.to_string(),
            "state": format!("{:?}", superblock.state).to_lowercase(),
            "rank": superblock.rank,
            "ranks": superblock.ranks,
            "devices": superblock.devices.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "layers": shape.layers,
            "segments": shape.segments,
            "object_bytes": shape.object_bytes,
            "block_tokens": shape.block_tokens,
            "codec": superblock.layout.codec.name(),
            "files": superblock.layout.files,
            "checksums_a_file": superblock.layout.words_per_file,
            "namespaces_max": superblock.layout.namespaces_max,
            "data_offset": superblock.data.map(|data| data.offset),
            "data_bytes": superblock.data.map(|data| data.bytes),
            "group_files": superblock.data.map(|data| data.group),
            "slot_bytes": superblock.data.map(|data| data.slot_bytes),
            "journal_offset": superblock.journal.map(|journal| journal.offset),
        })
    });
    json!({
        "store": store,
        "owner": survey.owner,
        "devices": survey.devices,
        "journal": survey.journal.as_ref().map(journal_json),
        "namespaces": survey.namespaces,
        "stored_files": survey.stored_files,
        "damage": survey.damage,
    })
}

fn text(survey: &Survey) -> String {
    let mut rows = Vec::new();
    if let Some(found) = survey.devices.iter().find_map(|device| device.superblock.as_ref()) {
        let (layout, shape) = (found.layout, found.layout.shape);
        let ranks = format!("rank {} of {}, {:?}", found.rank, found.ranks, found.state);
        rows.push(row("store", found.store, ranks.to_lowercase()));
        let (codec, words) = (layout.codec, layout.words_per_file);
        let objects = format!("{shape}, codec {codec}, {words} checksums a file");
        rows.push(row("files", grouped(layout.files.into()), objects));
        if let Some(data) = found.data {
            let group =
                format!("groups of {} files, slots of {} bytes", data.group, data.slot_bytes);
            rows.push(row(
                "data",
                Size(data.bytes),
                format!("from byte {} on; {group}", data.offset),
            ));
        }
    }
    if let Some(owner) = &survey.owner {
        rows.push(row("open", "", format!("{owner}; it changes meanwhile")));
    }
    for (at, device) in survey.devices.iter().enumerate() {
        let copies: Vec<String> = (0..)
            .zip(&device.copies)
            .map(|(at, copy)| match (&copy.problem, copy.sequence) {
                (None, Some(sequence)) => format!("copy {at}: sequence {sequence}"),
                (problem, _) => format!("copy {at}: {}", problem.clone().unwrap_or_default()),
            })
            .collect();
        let note = format!("{}\n{}\n{}", device.device, device.identity, copies.join("\n"));
        rows.push(row(&format!("device {at}"), Size(device.region_bytes), note));
    }
    if let Some(journal) = &survey.journal {
        rows.push(journal_row(journal));
    }
    for namespace in &survey.namespaces {
        let quota = namespace.quota_files.map_or("none".to_owned(), |files| grouped(files.into()));
        let note = format!(
            "{} {}\nepoch {}, weight {}, quota {quota}",
            namespace.label, namespace.digest, namespace.epoch, namespace.weight
        );
        let stored = format!("{} stored", grouped(namespace.stored_files.into()));
        rows.push(row(&format!("namespace {}", namespace.id), stored, note.trim()));
    }
    rows.extend(survey.damage.iter().map(|damage| row("damage", "", damage)));
    table(&rows)
}

fn journal_json(journal: &JournalScan) -> serde_json::Value {
    let RecordCounts { namespace, commit, evict, clear, epoch, used } = journal.records;
    json!({
        "half": journal.half.to_string(),
        "generation": journal.generation,
        "half_bytes": journal.half_bytes,
        "end_bytes": journal.end,
        "groups": journal.groups,
        "namespace_records": namespace,
        "commit_records": commit,
        "evict_records": evict,
        "clear_records": clear,
        "epoch_records": epoch,
        "use_records": used,
        "damage": journal.damage.as_ref().map(ToString::to_string),
    })
}

fn journal_row(journal: &JournalScan) -> [String; 3] {
    let RecordCounts { namespace, commit, evict, clear, epoch, used } = journal.records;
    let [namespace, commit, evict, clear, epoch, used] =
        [namespace, commit, evict, clear, epoch, used].map(grouped);
    let note = format!(
        "half {}, generation {}, {} groups, {} of {}; records: {namespace} namespace, {commit} \
         commit, {evict} evict, {clear} clear, {epoch} epoch, {used} use",
        journal.half,
        journal.generation,
        grouped(journal.groups),
        Size(journal.end),
        Size(journal.half_bytes),
    );
    let state = if journal.damage.is_some() { "damaged" } else { "whole" };
    row("journal", state, note)
}

#[cfg(test)]
mod tests;
