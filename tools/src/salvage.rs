//! `ripieno fsck --salvage`: finds and keeps the intact blocks of a store with a damaged journal.

use std::path::Path;

use anyhow::bail;
use kv_catalog::{Expected, Member, Superblock, check_set};
use objstore::{Medium, Salvage, Store, StoreError};
use ripieno_stack::{Ranks, StackConfig};
use serde_json::{Value, json};

use crate::offline;
use crate::problem::{Problem, user_error};
use crate::progress::Progress;
use crate::size::{Size, grouped};
use crate::survey::Survey;

/// Number of lost blocks to show.
const SHOWN: usize = 32;

/// Blocks that can be kept, and losses, as JSON and in words.
#[derive(Debug)]
pub(crate) struct Findings {
    pub(crate) kept: u32,
    pub(crate) json: Value,
    pub(crate) text: String,
}

/// Reads the rest of the journal and all data that it refers to. Writes nothing.
pub(crate) fn find(
    survey: &Survey,
    media: &mut [Medium],
    config: &StackConfig,
    quiet: bool,
) -> anyhow::Result<(Salvage, Findings)> {
    let Some(at) = survey.carrier() else {
        let hint = "name the devices of the store's first rank";
        bail!(Problem::new("--salvage: none of these devices carries a journal", hint));
    };
    if !survey.is_whole_set {
        let hint = "name all devices of the store, in their order";
        bail!(Problem::new(format!("--salvage: {}", survey.damage.join("; ")), hint));
    }
    let superblock = survey.devices[at].superblock.clone().expect("it carries the journal");
    let progress = Progress::bytes("read", 0, !quiet);
    let read = Salvage::read(&mut media[at], &superblock, |done, all| progress.read(done, all));
    progress.finish();
    let mut salvage = read.map_err(refused)?;
    let progress = Progress::new("files", salvage.kept() as usize, !quiet);
    if superblock.data.is_some() {
        salvage
            .verify(media, &superblock, |done, all| progress.read(done, all))
            .map_err(refused)?;
    } else {
        verify_ranks(&mut salvage, &superblock, config, &progress)?;
    }
    progress.finish();
    let findings = Findings::new(&salvage);
    Ok((salvage, findings))
}

/// Verifies the data of all ranks, whose directories are next to the catalog's.
fn verify_ranks(
    salvage: &mut Salvage,
    catalog: &Superblock,
    config: &StackConfig,
    progress: &Progress,
) -> anyhow::Result<()> {
    let above = config.path.as_deref().and_then(Path::parent);
    let Some(dir) = above else {
        let hint = "name the catalog's directory below the store's: --path DIR/catalog";
        bail!(Problem::new("--salvage: the catalog does not say where its ranks are", hint));
    };
    let ranks = Ranks::open(dir).map_err(user_error)?;
    for rank in 0..catalog.ranks {
        let devices = offline::attach(ranks.devices(rank).map_err(user_error)?)?;
        let mut media = Store::media(devices.attached())?;
        let superblocks = rank_superblocks(&mut media, catalog, rank)?;
        salvage
            .verify(&mut media, &superblocks[0], |done, all| progress.read(done, all))
            .map_err(refused)?;
        drop(media);
        devices.shut_down().map_err(user_error)?;
    }
    Ok(())
}

fn rank_superblocks(
    media: &mut [Medium],
    catalog: &Superblock,
    rank: u32,
) -> anyhow::Result<Vec<Superblock>> {
    let mut members = Vec::new();
    for medium in media {
        let found = Superblock::read(&mut *medium.io).map_err(StoreError::from).map_err(refused)?;
        let (name, identity) = (medium.io.name().to_owned(), medium.identity.clone());
        members.push(Member { name, identity, region: medium.region, found });
    }
    let expected = Expected { store: Some(catalog.store), rank, shape: None, codec: None };
    let set = check_set(&members, &expected);
    set.map_err(|error| Problem::new(format!("--salvage: {error}"), "").into())
}

/// Turns configuration errors into user errors.
fn refused(error: StoreError) -> anyhow::Error {
    match error {
        StoreError::Config { field: "checksums", problem } => Problem::new(
            format!("--salvage: {problem}"),
            "ripieno fsck --repair makes the journal empty: all keys are lost",
        )
        .into(),
        StoreError::Config { .. } | StoreError::Format(_) => {
            Problem::new(format!("--salvage: {error}"), "").into()
        }
        error => anyhow::Error::new(error).context("reading what is left"),
    }
}

impl Findings {
    fn new(salvage: &Salvage) -> Self {
        let (kept, journal) = (salvage.kept(), salvage.journal());
        let mut lines = vec![
            format!(
                "salvage: {} blocks can be kept: their data is what was stored",
                grouped(kept.into())
            ),
            format!(
                "  not read: {} places of the journal, {}; {} records make no sense without them",
                grouped(journal.gaps),
                Size(journal.gap_bytes),
                grouped(journal.refused)
            ),
            "  not known: blocks that were recorded there are lost, and what was removed or \
             cleared there, or is of an epoch that ended there, is found again"
                .to_owned(),
            format!(
                "  lost: {} blocks whose data is not what was stored; most were evicted since",
                grouped(salvage.lost().len() as u64)
            ),
        ];
        let mut lost = Vec::new();
        for it in salvage.lost() {
            let (file, namespace, label) = (it.file.0, it.namespace.0, salvage.label(it.namespace));
            let key: String = it.key.0.iter().map(|byte| format!("{byte:02x}")).collect();
            if lost.len() < SHOWN {
                lines.push(format!("    file {file}, namespace {namespace} {label}, key {key}"));
            }
            lost.push(json!({ "file": file, "namespace": namespace, "label": label, "key": key }));
        }
        if lost.len() > SHOWN {
            lines.push(format!("    {} more; --json has all of them", lost.len() - SHOWN));
        }
        let json = json!({
            "kept": kept,
            "gaps": journal.gaps,
            "gap_bytes": journal.gap_bytes,
            "refused_records": journal.refused,
            "lost": lost,
        });
        Self { kept, json, text: lines.join("\n") }
    }
}
