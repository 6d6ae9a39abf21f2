//! A plain model of the catalog's state, as a journal should restore it, and random changes of it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
    record::{Record, UseKind},
};

pub const FILES: u32 = 24;
pub const WORDS: u32 = 2;

/// Pseudo-random numbers of a seed (SplitMix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % u64::from(bound)) as u32
    }

    pub fn one_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct File {
    namespace: NamespaceId,
    key: BlockKey,
    checksums: Vec<u32>,
}

/// The state that records produce.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Model {
    namespaces: BTreeMap<NamespaceId, u64>,
    files: BTreeMap<FileId, File>,
}

impl Model {
    /// Applies a record as the catalog must: later records win.
    pub fn apply(&mut self, record: Record<'_>) -> Result<(), String> {
        match record {
            Record::Namespace { id, epoch, .. } => {
                self.namespaces.insert(id, epoch);
            }
            Record::Commit { file, namespace, key, checksums } => {
                if !self.namespaces.contains_key(&namespace) {
                    return Err(format!("namespace {namespace} is unknown"));
                }
                if file.0 >= FILES || checksums.len() != WORDS as usize {
                    return Err(format!("{file} with {} checksums", checksums.len()));
                }
                self.files.retain(|_, other| (other.namespace, other.key) != (namespace, key));
                let checksums = checksums.iter().collect();
                self.files.insert(file, File { namespace, key, checksums });
            }
            Record::Evict { first, count } => {
                self.files.retain(|file, _| file.0 < first.0 || file.0 - first.0 >= count);
            }
            Record::Clear { namespace } => {
                self.files.retain(|_, file| file.namespace != namespace);
            }
            Record::Epoch { namespace, epoch } => {
                self.files.retain(|_, file| file.namespace != namespace);
                *self.namespaces.get_mut(&namespace).ok_or("an epoch of no namespace")? = epoch;
            }
            Record::Use { .. } => {}
        }
        Ok(())
    }

    /// Encodes all namespaces, if `first` is 0, and `count` files from `first` on.
    pub fn snapshot(&self, first: u32, count: u32) -> Vec<u8> {
        let mut out = Vec::new();
        for (id, epoch) in self.namespaces.iter().filter(|_| first == 0) {
            namespace(*id, *epoch).encode(&mut out);
        }
        for (file, state) in self.files.range(FileId(first)..FileId(first + count)) {
            commit(*file, state.namespace, state.key, &state.checksums).encode(&mut out);
        }
        out
    }
}

fn namespace(id: NamespaceId, epoch: u64) -> Record<'static> {
    let (digest, quota_files, weight) = ([id.0 as u8; 32], None, 100);
    Record::Namespace { id, digest, epoch, quota_files, weight, label: "tenant", owner: None }
}

fn commit<'a>(
    file: FileId,
    namespace: NamespaceId,
    key: BlockKey,
    checksums: &'a [u32],
) -> Record<'a> {
    Record::Commit { file, namespace, key, checksums: checksums.into() }
}

/// Makes a random change that is possible in `model`, as its record.
pub fn change(model: &Model, numbers: &mut Numbers, serial: u32, out: &mut Vec<u8>) {
    let file = FileId(numbers.below(FILES));
    let known: Vec<NamespaceId> = model.namespaces.keys().copied().collect();
    let kind = numbers.below(20);
    if known.is_empty() || kind == 0 {
        return namespace(NamespaceId(known.len() as u32 % 4), u64::from(serial)).encode(out);
    }
    let namespace = known[numbers.below(known.len() as u32) as usize];
    let used: BTreeSet<FileId> = model.files.keys().copied().collect();
    let record = match kind {
        1 => Record::Use { first: file, count: 1, how: UseKind::Touched },
        2 if numbers.one_in(3) => Record::Clear { namespace },
        3 if numbers.one_in(3) => Record::Epoch { namespace, epoch: u64::from(serial) },
        4..8 => Record::Evict { first: file, count: 1 + numbers.below(FILES - file.0).min(3) },
        // A file that holds a block is evicted before it holds another one.
        _ if used.contains(&file) => Record::Evict { first: file, count: 1 },
        _ => {
            let mut key = [0; 32];
            key[..4].copy_from_slice(&serial.to_le_bytes());
            return commit(file, namespace, BlockKey(key), &[serial, !serial]).encode(out);
        }
    };
    record.encode(out);
}
