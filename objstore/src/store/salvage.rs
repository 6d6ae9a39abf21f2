//! Salvage of a store with a damaged journal: keeps the blocks that their checksums verify.

use std::collections::{BTreeMap, BTreeSet};

use kv_catalog::{
    BlockIo, Catalog, CatalogConfig, FileId, Geometry, JournalSalvage, PolicyKind, Row,
    SnapshotCursor, StoreLayout, StoredFile, Superblock, rewrite_journal, salvage_journal,
};

use super::Medium;
use crate::error::StoreError;

/// Bytes per read; at least an object.
const RUN_BYTES: u64 = 1 << 20;

/// Bytes of records per copy.
const PIECE_BYTES: usize = 1 << 20;

/// The blocks of a store with a damaged journal that can be kept.
///
/// Each Commit record names the block that a file holds, and has checksums of all of its objects.
/// If the objects match, the block is valid, whatever happened since; all other blocks are
/// lost. Records in the damaged part are not known: a block that was removed or cleared there, or
/// that is of an epoch which ended there, may be found again.
#[derive(Debug)]
pub struct Salvage {
    catalog: Catalog,
    superblock: Superblock,
    journal: JournalSalvage,
    verified: BTreeSet<u32>,
    lost: Vec<StoredFile>,
}

impl Salvage {
    /// Reads the rest of the journal on `medium`, which carries the catalog. Writes nothing. Calls
    /// `progress` with the bytes read so far, and their total.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] for a store without checksums, which nothing can verify, or
    /// [`StoreError::Journal`] if the device cannot read much of the journal, or carries none.
    pub fn read(
        medium: &mut Medium,
        superblock: &Superblock,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self, StoreError> {
        let layout = superblock.layout;
        if layout.words_per_file == 0 {
            let problem = format!(
                "store {} keeps none, so nothing proves which block a file holds",
                superblock.store
            );
            return Err(StoreError::Config { field: "checksums", problem });
        }
        let mut catalog = Catalog::new(CatalogConfig {
            files: layout.files,
            file_bytes: layout.stored().block_bytes(),
            ranks: superblock.ranks,
            words_per_file: layout.words_per_file,
            namespaces_max: layout.namespaces_max,
            journal: false,
            files_ahead: 0,
            seed: 0,
            policy: PolicyKind::default(),
            write_budget: None,
        });
        let visit = |record: kv_catalog::Record<'_>| catalog.salvage(&record).is_ok();
        let journal = salvage_journal(&mut *medium.io, superblock, visit, progress)?;
        catalog.recovered();
        let superblock = superblock.clone();
        Ok(Self { catalog, superblock, journal, verified: BTreeSet::new(), lost: Vec::new() })
    }

    /// Reads one rank's part of all files, and gives up those that do not match their records.
    /// `media` are the rank's devices in their order, and `superblock` that of the first. Calls
    /// `progress` with the files read so far, and their total.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] if these are not the devices of a rank of this store.
    ///
    /// # Panics
    /// Never panics because of the contents of the devices.
    pub fn verify(
        &mut self,
        media: &mut [Medium],
        superblock: &Superblock,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(), StoreError> {
        let rank = superblock.rank;
        let wrong = |problem| StoreError::Config { field: "devices", problem };
        let same = (superblock.store, superblock.ranks)
            == (self.superblock.store, self.superblock.ranks)
            && superblock.layout.words_per_file == self.superblock.layout.words_per_file
            && rank < superblock.ranks
            && superblock.devices.len() == media.len();
        let (Some(geometry), Some(data), true) = (superblock.geometry(), superblock.data, same)
        else {
            return Err(wrong(format!(
                "they are not those of a rank of {}",
                self.superblock.store
            )));
        };
        if geometry.rows * superblock.ranks != self.superblock.layout.words_per_file {
            return Err(wrong(format!("rank {rank} has another shape than the catalog")));
        }
        let all = u64::from(self.catalog.counts().stored);
        let (mut next, mut done) = (FileId(0), 0);
        loop {
            let group = |file: &StoredFile| file.file.0 / geometry.group;
            let mut files = self.catalog.stored_from(next).peekable();
            let Some(at) = files.peek().map(group) else { break };
            let files: Vec<StoredFile> = files.take_while(|file| group(file) == at).collect();
            next = FileId(files[files.len() - 1].file.0 + 1);
            let bad = self.wrong_files(media, &files, &geometry, (rank, data.offset));
            for file in files.iter().filter(|file| bad.contains(&file.file)) {
                self.catalog.lost(file.file);
                self.lost.push(*file);
            }
            done += files.len() as u64;
            progress(done, all);
        }
        self.verified.insert(rank);
        Ok(())
    }

    /// Returns those of `files`, all of one group, that do not match their records on this rank,
    /// whose data begins at this offset.
    fn wrong_files(
        &self,
        media: &mut [Medium],
        files: &[StoredFile],
        geometry: &Geometry,
        (rank, offset): (u32, u64),
    ) -> BTreeSet<FileId> {
        let slot_bytes = u64::from(geometry.slot_bytes);
        let mut wrong = BTreeSet::new();
        for row in (0..geometry.rows).map(Row) {
            let mut places = BTreeMap::new();
            for StoredFile { file, .. } in files {
                let place = geometry.object(*file, row);
                places.insert((place.device.0, place.slot.0), *file);
            }
            let places: Vec<((u32, u64), FileId)> = places.into_iter().collect();
            for run in places.chunk_by(|(a, _), (b, _)| (a.0, a.1 + 1) == *b) {
                for run in run.chunks((RUN_BYTES / slot_bytes).max(1) as usize) {
                    let ((device, slot), _) = run[0];
                    let io = &mut *media[device as usize].io;
                    let bytes = read_slots(io, offset + slot * slot_bytes, run.len(), slot_bytes);
                    for ((_, file), object) in run.iter().zip(bytes) {
                        let at = (rank * geometry.rows + row.0) as usize;
                        let recorded = self.catalog.checksums(*file)[at];
                        let StoreLayout { codec, shape, .. } = &self.superblock.layout;
                        if codec.checksum(shape, &object) != Some(recorded) {
                            wrong.insert(*file);
                        }
                    }
                }
            }
        }
        wrong
    }

    /// Returns the result of reading the journal.
    #[must_use]
    pub fn journal(&self) -> &JournalSalvage {
        &self.journal
    }

    /// Returns the number of blocks that can be kept, as far as their data was read.
    #[must_use]
    pub fn kept(&self) -> u32 {
        self.catalog.counts().stored
    }

    /// Returns blocks that have a record, but whose data does not match it: most of them were
    /// evicted since.
    #[must_use]
    pub fn lost(&self) -> &[StoredFile] {
        &self.lost
    }

    /// Returns the label of a namespace.
    #[must_use]
    pub fn label(&self, namespace: kv_catalog::NamespaceId) -> &str {
        let mut all = self.catalog.namespaces();
        all.find(|(id, ..)| *id == namespace).map_or("", |(_, label, _)| label)
    }

    /// Writes a journal of the blocks kept. The damaged one stays valid until the last write, so
    /// that an interruption loses nothing.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] before all ranks were verified, or [`StoreError::Journal`].
    pub fn write(mut self, medium: &mut Medium) -> Result<(), StoreError> {
        if let Some(rank) = (0..self.superblock.ranks).find(|rank| !self.verified.contains(rank)) {
            let problem = format!("the data of rank {rank} was not read yet");
            return Err(StoreError::Config { field: "devices", problem });
        }
        let mut cursor = Some(SnapshotCursor::default());
        let next = |records: &mut Vec<u8>| {
            cursor = cursor.and_then(|at| self.catalog.snapshot(at, PIECE_BYTES, records));
            cursor.is_some()
        };
        Ok(rewrite_journal(&mut *medium.io, &mut self.superblock, next)?)
    }
}

/// Reads adjacent slots; those that the device cannot read are empty.
fn read_slots(io: &mut dyn BlockIo, offset: u64, slots: usize, slot_bytes: u64) -> Vec<Vec<u8>> {
    let mut bytes = vec![0; slots * slot_bytes as usize];
    if io.read(offset, &mut bytes).is_ok() {
        return bytes.chunks(slot_bytes as usize).map(<[u8]>::to_vec).collect();
    }
    let slot = |at: u64| {
        let mut bytes = vec![0; slot_bytes as usize];
        let read = io.read(offset + at * slot_bytes, &mut bytes);
        read.map_or_else(|_| Vec::new(), |()| bytes)
    };
    (0..slots as u64).map(slot).collect()
}
