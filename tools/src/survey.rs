//! On-disk state of a store's devices and its damage. Only reads.

use std::collections::BTreeMap;

use kv_catalog::{
    Catalog, CatalogConfig, CopyFault, Expected, JournalError, JournalScan, Member, NamespaceId,
    OnDevice, PolicyKind, Record, Superblock, check_set, scan_journal,
};
use objstore::Medium;
use serde::Serialize;

use crate::problem::Problem;

/// One copy of a superblock.
#[derive(Debug, Serialize)]
pub(crate) struct CopyView {
    pub(crate) sequence: Option<u64>,
    /// Damage of the copy; null if none.
    pub(crate) problem: Option<String>,
}

/// A device. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceView {
    pub(crate) device: String,
    pub(crate) identity: String,
    pub(crate) region_bytes: u64,
    pub(crate) lba_bytes: u32,
    /// Copies of the superblock.
    pub(crate) copies: Vec<CopyView>,
    #[serde(skip)]
    pub(crate) superblock: Option<Superblock>,
    /// The copy that can be rewritten from the other one.
    #[serde(skip)]
    pub(crate) lost_copy: Option<usize>,
}

/// A namespace, after replay of all readable records.
#[derive(Debug, Serialize)]
pub(crate) struct NamespaceView {
    pub(crate) id: u32,
    pub(crate) label: String,
    pub(crate) digest: String,
    pub(crate) epoch: u64,
    pub(crate) stored_files: u32,
    pub(crate) quota_files: Option<u32>,
    pub(crate) weight: u32,
}

/// State of all devices.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    /// The process that has the store open through another controller meanwhile.
    pub(crate) owner: Option<String>,
    pub(crate) devices: Vec<DeviceView>,
    /// The journal's active half.
    pub(crate) journal: Option<JournalScan>,
    pub(crate) namespaces: Vec<NamespaceView>,
    /// Number of readable keys.
    pub(crate) stored_files: u32,
    /// All damage found.
    pub(crate) damage: Vec<String>,
    /// True if all devices of the rank are present, in order.
    pub(crate) is_whole_set: bool,
}

impl Survey {
    /// Reads everything but the data. `progress` receives the number of bytes of the journal read,
    /// and their maximum.
    pub(crate) fn take(
        media: &mut [Medium],
        progress: impl FnMut(u64, u64),
    ) -> anyhow::Result<Self> {
        let mut survey = Self::default();
        let mut members = Vec::new();
        let mut elsewhere = None;
        for medium in &mut *media {
            let name = medium.io.name().to_owned();
            let copies = Superblock::read_copies(&mut *medium.io)?;
            let found = match Superblock::read(&mut *medium.io) {
                Ok(found) => Some(found),
                Err(error) => {
                    survey.damage.push(error.to_string());
                    None
                }
            };
            let superblock = match &found {
                Some(OnDevice::Ours(superblock)) => Some((**superblock).clone()),
                Some(OnDevice::Blank) => None,
                Some(OnDevice::Foreign(what)) => {
                    elsewhere = Some(format!("{name}: it holds {what}, and no store"));
                    None
                }
                None => None,
            };
            survey.devices.push(survey_device(&name, medium, copies, superblock));
            if let Some(found) = found {
                let (identity, region) = (medium.identity.clone(), medium.region);
                members.push(Member { found, name, identity, region });
            }
        }
        survey.add_copies();
        let Some(first) = survey.devices.iter().find_map(|device| device.superblock.clone()) else {
            if survey.damage.is_empty() {
                let names: Vec<_> = survey.devices.iter().map(|it| it.device.as_str()).collect();
                let none = || format!("{}: no copy of a superblock is there", names.join(", "));
                let hint = "make a store with ripieno format; what one had there cannot be found";
                anyhow::bail!(Problem::new(elsewhere.unwrap_or_else(none), hint));
            }
            return Ok(survey);
        };
        let expected = Expected { store: None, rank: first.rank, shape: None, codec: None };
        if members.len() == media.len() {
            match check_set(&members, &expected) {
                Ok(_) => survey.is_whole_set = true,
                Err(error) => survey.damage.push(error.to_string()),
            }
        }
        survey.add_journal(media, progress)?;
        Ok(survey)
    }

    /// Returns true if an empty journal repairs the damage; else the device needs attention.
    pub(crate) fn can_be_emptied(&self) -> bool {
        let damage = self.journal.as_ref().and_then(|journal| journal.damage.as_ref());
        damage.is_some_and(|damage| !matches!(damage, JournalError::Block(_)))
    }

    /// Returns the device that carries the journal.
    pub(crate) fn carrier(&self) -> Option<usize> {
        let carries = |device: &DeviceView| {
            device.superblock.as_ref().is_some_and(|superblock| superblock.journal.is_some())
        };
        self.devices.iter().position(carries)
    }

    fn add_copies(&mut self) {
        for device in self.devices.iter().filter(|device| device.superblock.is_some()) {
            for (at, copy) in device.copies.iter().enumerate() {
                if let Some(problem) = &copy.problem {
                    let device = &device.device;
                    self.damage.push(format!("{device}: copy {at} of the superblock: {problem}"));
                }
            }
        }
    }

    fn add_journal(
        &mut self,
        media: &mut [Medium],
        progress: impl FnMut(u64, u64),
    ) -> anyhow::Result<()> {
        let Some(at) = self.carrier() else { return Ok(()) };
        let Some(superblock) = self.devices[at].superblock.clone() else { return Ok(()) };
        // The tables are sized by what it says.
        if superblock.region.bytes() > media[at].io.bytes() {
            return Ok(());
        }
        let mut catalog = Catalog::new(CatalogConfig {
            files: superblock.layout.files,
            file_bytes: superblock.layout.stored().block_bytes(),
            ranks: superblock.ranks,
            words_per_file: superblock.layout.words_per_file,
            namespaces_max: superblock.layout.namespaces_max,
            journal: false,
            files_ahead: 0,
            seed: 0,
            policy: PolicyKind::default(),
            write_budget: None,
        });
        let mut names = BTreeMap::new();
        let visit = |record: Record<'_>| {
            if let Record::Namespace { id, digest, label, .. } = record {
                names.insert(id.0, (digest, label.to_owned()));
            }
            catalog.apply(&record)
        };
        let scan = scan_journal(&mut *media[at].io, &superblock, visit, progress)?;
        catalog.recovered();
        self.stored_files = catalog.counts().stored;
        for (id, (digest, label)) in names {
            // A refused namespace is part of the damage.
            let Ok(usage) = catalog.usage(NamespaceId(id)) else { continue };
            self.namespaces.push(NamespaceView {
                id,
                label,
                digest: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
                epoch: usage.epoch,
                stored_files: usage.stored,
                quota_files: usage.quota_files,
                weight: usage.weight,
            });
        }
        self.damage.extend(scan.damage.iter().map(ToString::to_string));
        self.journal = Some(scan);
        Ok(())
    }
}

fn survey_device(
    name: &str,
    medium: &Medium,
    copies: [Result<Superblock, CopyFault>; 2],
    superblock: Option<Superblock>,
) -> DeviceView {
    let lost = |copy: &Result<Superblock, CopyFault>| {
        matches!(copy, Err(CopyFault::None | CopyFault::Checksum))
    };
    DeviceView {
        device: name.to_owned(),
        identity: medium.identity.to_string(),
        region_bytes: medium.region.bytes(),
        lba_bytes: medium.identity.lba_bytes,
        lost_copy: copies.iter().position(lost).filter(|_| superblock.is_some()),
        copies: copies
            .iter()
            .map(|copy| CopyView {
                sequence: copy.as_ref().ok().map(|superblock| superblock.sequence),
                problem: copy.as_ref().err().map(ToString::to_string),
            })
            .collect(),
        superblock,
    }
}
