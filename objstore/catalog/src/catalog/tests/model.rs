//! Random programs against a model that does everything the slow and obvious way: a map of keys, a
//! medium that is overwritten when a file is allocated, and journal halves of records.

mod expected;

use std::collections::BTreeSet;

use proptest::prelude::*;

use self::expected::{Block, Content, Model};
use super::*;

const FILES: u32 = 12;
const KEYS: u32 = 20;
const NAMESPACES: u32 = 3;
/// Descriptors that take turns as these.
const SALTS: u32 = 6;
const RANKS: u32 = 2;

#[derive(Debug, Clone)]
enum Step {
    Acquire(u32, Vec<u32>),
    Share(usize, usize, usize),
    Release(usize),
    Begin(u32, Vec<u32>),
    Report(usize, u32, bool),
    Commit(usize),
    Abort(usize),
    Evict(Option<u32>, u32),
    Remove(u32, Vec<u32>),
    Lost(u32),
    Clear(u32),
    Epoch(u32),
    Quota(u32, Option<u32>),
    Weight(u32, u32),
    /// Opens the namespace with this salt. A new one replaces another.
    Open(u32),
    /// Takes records of at most this many bytes.
    Group(usize),
    /// The oldest taken group is durable.
    Durable,
    /// Takes a piece of a snapshot; begins one if there is none.
    Snapshot(usize),
    /// Power is lost: only this part of the taken groups that are not durable was written.
    Crash(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let keys = || {
        let run = (0..KEYS, 1..7u32)
            .prop_map(|(first, n)| (first..(first + n).min(KEYS)).collect::<Vec<u32>>());
        (run, any::<bool>()).prop_map(|(mut keys, twice)| {
            if twice {
                keys.push(keys[0]);
            }
            keys
        })
    };
    let ns = || 0..NAMESPACES;
    let at = any::<usize>;
    let step = prop_oneof![
        6 => (ns(), keys()).prop_map(|(ns, keys)| Step::Acquire(ns, keys)),
        1 => (at(), 0..6usize, 0..6usize).prop_map(|(at, from, to)| Step::Share(at, from, to)),
        6 => at().prop_map(Step::Release),
        8 => (ns(), keys()).prop_map(|(ns, keys)| Step::Begin(ns, keys)),
        16 => (at(), 0..RANKS, prop::bool::weighted(0.95))
            .prop_map(|(at, rank, ok)| Step::Report(at, rank, ok)),
        8 => at().prop_map(Step::Commit),
        1 => at().prop_map(Step::Abort),
        3 => (prop::option::of(ns()), 1..5u32).prop_map(|(ns, files)| Step::Evict(ns, files)),
        1 => (ns(), keys()).prop_map(|(ns, keys)| Step::Remove(ns, keys)),
        1 => (0..FILES + 1).prop_map(Step::Lost),
        1 => ns().prop_map(Step::Clear),
        1 => ns().prop_map(Step::Epoch),
        1 => (ns(), prop::option::of(0..8u32)).prop_map(|(ns, files)| Step::Quota(ns, files)),
        1 => (ns(), 1..4u32).prop_map(|(ns, weight)| Step::Weight(ns, weight)),
        2 => (0..SALTS).prop_map(Step::Open),
        6 => (1..400usize).prop_map(Step::Group),
        6 => Just(Step::Durable),
        3 => (1..300usize).prop_map(Step::Snapshot),
        1 => at().prop_map(Step::Crash),
    ];
    proptest::collection::vec(step, 0..200)
}

/// The last record of a group, and the bytes of all of them.
type Written = (u64, Vec<u8>);

#[derive(Debug)]
struct OpenWrite {
    write: Write,
    namespace: u32,
    keys: Vec<u32>,
    reported: BTreeSet<u32>,
    failed: bool,
}

struct Both {
    catalog: Catalog,
    policy: PolicyKind,
    /// Limit on the bytes of queued records.
    limit: usize,
    model: Model,
    held: Vec<Reference>,
    writes: Vec<OpenWrite>,
    /// Records of the journal's active half, in groups with the last record of each.
    half: Vec<Written>,
    /// Groups that were taken but are not durable.
    taken: Vec<Written>,
    other: Option<(SnapshotCursor, Vec<Written>)>,
}

fn names(keys: &[u32]) -> Vec<BlockKey> {
    keys.iter().map(|number| key(*number)).collect()
}

fn checksum(content: Content, rank: u32, row: u32) -> u32 {
    (content.3 as u32) << 8 | content.2 << 2 | rank << 1 | row
}

fn empty(policy: PolicyKind) -> Catalog {
    Catalog::new(CatalogConfig { policy, namespaces_max: NAMESPACES, ..config(FILES, RANKS) })
}

fn descriptor(salt: u32) -> Namespace {
    Namespace { tenant_salt: vec![salt as u8], ..Namespace::default() }
}

/// Returns the number and the salt of each namespace.
fn namespaces(catalog: &Catalog) -> Vec<(u32, u32)> {
    let salt = |digest| (0..SALTS).find(|salt| descriptor(*salt).digest() == digest).unwrap();
    catalog.namespaces().map(|(id, _, digest)| (id.0, salt(digest))).collect()
}

impl Both {
    fn new(policy: PolicyKind, limit: usize) -> Self {
        let mut catalog = empty(policy);
        catalog.limit_pending(limit);
        let mut both = Self {
            catalog,
            policy,
            limit,
            model: Model {
                weights: [1; NAMESPACES as usize],
                ids: [0, 1, 2],
                salts: [0, 1, 2],
                ..Model::default()
            },
            held: Vec::new(),
            writes: Vec::new(),
            half: Vec::new(),
            taken: Vec::new(),
            other: None,
        };
        for number in 0..NAMESPACES {
            assert_eq!(tenant(&mut both.catalog, &[number as u8]), NamespaceId(number));
        }
        both
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Acquire(ns, keys) => self.acquire(*ns, keys),
            Step::Share(at, from, to) => self.share(*at, *from..*to),
            Step::Release(at) if !self.held.is_empty() => {
                let reference = self.held.swap_remove(at % self.held.len());
                self.catalog.release(reference.id).unwrap();
                reference.files.iter().for_each(|file| self.model.release(file.0));
                let twice = self.catalog.release(reference.id);
                assert_eq!(twice, Err(CatalogError::Reference { id: reference.id }));
            }
            Step::Begin(ns, keys) => self.begin(*ns, keys),
            Step::Report(at, rank, ok) if !self.writes.is_empty() => self.report(*at, *rank, *ok),
            Step::Commit(at) if !self.writes.is_empty() => self.commit(*at),
            Step::Abort(at) if !self.writes.is_empty() => {
                let write = self.writes.swap_remove(at % self.writes.len());
                self.catalog.abort(write.write.id).unwrap();
                self.ended(&write);
            }
            Step::Evict(ns, files) => self.evict(*ns, *files),
            Step::Remove(ns, keys) => {
                let keys: BTreeSet<u32> = keys.iter().copied().collect();
                let stored = |key: &&u32| {
                    self.model.keys.get(&(*ns, **key)).is_some_and(|block| block.stored)
                };
                let stored: Vec<u32> = keys.iter().filter(stored).copied().collect();
                let keys: Vec<u32> = keys.into_iter().collect();
                let removed = self.catalog.remove(self.model.id(*ns), &names(&keys)).unwrap();
                assert_eq!(removed as usize, stored.len());
                let lsn = self.catalog.log.last().0;
                stored.iter().for_each(|key| self.model.drop_key((*ns, *key), lsn));
            }
            Step::Lost(file) => {
                self.catalog.lost(FileId(*file));
                let lsn = self.catalog.log.last().0;
                let found = self.model.keys.iter().find(|(_, block)| block.file == *file);
                match found.map(|(key, block)| (*key, block.stored)) {
                    Some((key, true)) => self.model.drop_key(key, lsn),
                    Some((_, false)) => _ = self.model.unfit.insert(*file),
                    None => {}
                }
            }
            Step::Clear(ns) => {
                self.catalog.clear(self.model.id(*ns)).unwrap();
                self.forget(*ns);
            }
            Step::Epoch(ns) => {
                let epoch = self.catalog.bump_epoch(self.model.id(*ns)).unwrap();
                self.forget(*ns);
                self.model.epochs[*ns as usize] += 1;
                assert_eq!(epoch, self.model.epochs[*ns as usize]);
            }
            Step::Quota(ns, files) => {
                self.catalog.set_quota(self.model.id(*ns), *files).unwrap();
                self.model.quotas[*ns as usize] = *files;
                self.notice_evictions();
            }
            Step::Weight(ns, weight) => {
                self.catalog.set_weight(self.model.id(*ns), *weight).unwrap();
                self.model.weights[*ns as usize] = *weight;
            }
            Step::Open(salt) => self.open(*salt),
            Step::Group(max) => self.group(*max),
            Step::Durable => self.durable(),
            Step::Snapshot(max) => self.snapshot(*max),
            Step::Crash(part) => self.crash(*part),
            _ => {}
        }
        self.check();
    }

    fn open(&mut self, salt: u32) {
        let model = &mut self.model;
        let opened = self.catalog.namespace(&descriptor(salt));
        if let Some(ns) = model.salts.iter().position(|known| *known == salt) {
            assert_eq!(opened, Ok(NamespaceId(model.ids[ns])));
            return;
        }
        let unused = |ns: &u32| {
            let at = *ns as usize;
            model.held(*ns) == 0 && model.quotas[at].is_none() && model.weights[at] == 1
        };
        let Some(ns) = (0..NAMESPACES).filter(unused).min_by_key(|ns| model.ids[*ns as usize])
        else {
            refused(opened, "namespace ");
            return;
        };
        let (NamespaceId(id), before) = (opened.unwrap(), model.id(ns));
        assert_eq!(id % NAMESPACES, ns);
        assert!(model.ids.iter().all(|other| *other < id), "{id}, and {:?}", model.ids);
        let at = ns as usize;
        (model.ids[at], model.salts[at], model.epochs[at]) = (id, salt, 0);
        let unknown = CatalogError::Namespace { namespace: before };
        assert_eq!(self.catalog.lookup(before, &names(&[0])), Err(unknown));
    }

    fn acquire(&mut self, ns: u32, keys: &[u32]) {
        let stored = |key: &&u32| self.model.keys.get(&(ns, **key)).is_some_and(|b| b.stored);
        let stored: Vec<u32> = keys.iter().take_while(stored).copied().collect();
        let wanted = names(keys);
        assert_eq!(self.catalog.lookup(self.model.id(ns), &wanted), Ok(stored.len()));
        let each =
            keys.iter().map(|key| self.model.keys.get(&(ns, *key)).is_some_and(|b| b.stored));
        assert_eq!(self.catalog.are_stored(self.model.id(ns), &wanted), Ok(each.collect()));
        let reference = self.catalog.acquire(self.model.id(ns), &wanted).unwrap();
        let expected: Vec<u32> =
            stored.iter().map(|key| self.model.keys[&(ns, *key)].file).collect();
        assert_eq!(reference.files.iter().map(|file| file.0).collect::<Vec<_>>(), expected);
        expected.iter().for_each(|file| *self.model.refs.entry(*file).or_default() += 1);
        self.held.push(reference);
    }

    fn share(&mut self, at: usize, range: std::ops::Range<usize>) {
        if self.held.is_empty() {
            return;
        }
        let from = &self.held[at % self.held.len()];
        let stored = |file: &FileId| {
            self.model.keys.values().any(|block| block.file == file.0 && block.stored)
        };
        let positions: Vec<usize> = range.collect();
        let shared = self.catalog.share(from.id, &positions);
        let files = positions.iter().map(|at| from.files.get(*at).copied());
        match files.collect::<Option<Vec<FileId>>>() {
            None => refused(shared, "positions up to "),
            Some(files) => match files.iter().position(|file| !stored(file)) {
                Some(at) => {
                    let (position, file) = (positions[at], files[at]);
                    assert_eq!(shared, Err(CatalogError::Dropped { position, file }));
                }
                None => {
                    let shared = shared.unwrap();
                    assert_eq!(shared.files, files);
                    for file in files {
                        *self.model.refs.entry(file.0).or_default() += 1;
                    }
                    self.held.push(shared);
                }
            },
        }
    }

    fn begin(&mut self, ns: u32, keys: &[u32]) {
        let write = self.catalog.begin(self.model.id(ns), &names(keys)).unwrap();
        self.notice_evictions();
        let model = &mut self.model;
        let number = model.writes_ever;
        model.writes_ever += 1;
        for (Position { file, own }, key) in write.positions.iter().zip(keys) {
            let known = model.keys.get(&(ns, *key)).copied();
            assert_eq!(known.map(|block| block.file), Some(file.0).filter(|_| !own));
            if !own {
                *model.refs.entry(file.0).or_default() += 1;
                continue;
            }
            assert!(model.keys.values().all(|block| block.file != file.0), "{file} has a key");
            assert!(!model.in_use(file.0) && !model.doomed.contains_key(&file.0), "{file}");
            if let Some(lsn) = model.dropped.remove(&file.0) {
                assert!(lsn <= model.durable, "{file} is used again before the journal has it");
            }
            let at = ns as usize;
            let content = ((model.salts[at], model.ids[at]), model.epochs[at], *key, number);
            // From here on the ranks write to it.
            model.medium.insert(file.0, content);
            model.writing.insert(file.0);
            let block = Block { file: file.0, stored: false, content };
            model.keys.insert((ns, *key), block);
        }
        let own = write.own().count() as u32;
        let (held, quota) = (model.held(ns), model.quotas[ns as usize]);
        assert!(own == 0 || quota.is_none_or(|quota| held <= quota), "{held} of {quota:?}");
        if write.positions.len() < keys.len() {
            let counts = self.catalog.counts();
            // The request's own blocks are not evicted for it.
            let other = |(at, block): &(&(u32, u32), &Block)| {
                model.evictable(block) && !(at.0 == ns && keys.contains(&at.1))
            };
            let full = quota.is_some_and(|quota| held >= quota);
            let others = model.keys.iter().filter(other).count();
            assert!(full || counts.free == 0, "{counts:?}");
            assert!(full || counts.limbo > 0 || others == 0, "{counts:?}");
        }
        let keys = keys[..write.positions.len()].to_vec();
        let (reported, failed) = (BTreeSet::new(), false);
        self.writes.push(OpenWrite { write, namespace: ns, keys, reported, failed });
    }

    fn report(&mut self, at: usize, rank: u32, ok: bool) {
        let at = at % self.writes.len();
        let open = &mut self.writes[at];
        let id = open.write.id;
        let mut checksums = Vec::new();
        for file in open.write.own() {
            let content = self.model.medium[&file.0];
            checksums.extend([checksum(content, rank, 0), checksum(content, rank, 1)]);
        }
        let reported = match ok {
            true => self.catalog.written(id, rank, &checksums),
            false => self.catalog.failed(id, rank),
        };
        if !open.reported.insert(rank) {
            refused(reported, &format!("rank {rank} has reported on this write before"));
            return;
        }
        open.failed |= !ok;
        let all = open.reported.len() == RANKS as usize;
        let expected = match (all, open.failed) {
            (false, _) => Reported::Waiting,
            (true, false) => Reported::All,
            (true, true) => Reported::Failed,
        };
        assert_eq!(reported, Ok(expected));
        if expected == Reported::Failed {
            let open = self.writes.swap_remove(at);
            assert_eq!(self.catalog.abort(id), Err(CatalogError::Write { id }));
            self.ended(&open);
        }
    }

    fn commit(&mut self, at: usize) {
        let at = at % self.writes.len();
        let open = &self.writes[at];
        let missing = RANKS - open.reported.len() as u32;
        let before = self.catalog.log.last().0;
        let committed = self.catalog.commit(open.write.id);
        if open.failed {
            refused(committed, "a rank failed to write its part");
            return;
        }
        if missing > 0 {
            assert_eq!(committed, Err(CatalogError::Unreported { missing, ranks: RANKS }));
            return;
        }
        let open = self.writes.swap_remove(at);
        assert_eq!(committed, Ok(self.catalog.log.last()));
        let mut lsn = before;
        for (position, key) in open.write.positions.iter().zip(&open.keys).rev() {
            let key = (open.namespace, *key);
            let block = self.model.keys.get_mut(&key);
            let block = block.filter(|block| position.own && block.file == position.file.0);
            let unfit = &self.model.unfit;
            if let Some(block) = block.filter(|block| !unfit.contains(&block.file)) {
                block.stored = true;
                lsn += 1;
                self.model.commits.push((lsn, key, block.content));
            }
        }
        assert_eq!(committed, Ok(Lsn(lsn)));
        self.ended(&open);
    }

    /// Removes a write that has ended from the model.
    fn ended(&mut self, open: &OpenWrite) {
        for (position, key) in open.write.positions.iter().zip(&open.keys) {
            let (file, key) = (position.file.0, (open.namespace, *key));
            if !position.own {
                self.model.release(file);
                continue;
            }
            let block = self.model.keys.get(&key).filter(|block| block.file == file).copied();
            if block.is_some_and(|block| !block.stored) {
                self.model.drop_key(key, 0);
            }
            self.model.writing.remove(&file);
            self.model.unfit.remove(&file);
            self.model.settle(file);
        }
    }

    fn evict(&mut self, ns: Option<u32>, files: u32) {
        let usable = |catalog: &Catalog| catalog.counts().free + catalog.counts().limbo;
        let before = usable(&self.catalog);
        let evicted = self.catalog.evict(ns.map(|ns| self.model.id(ns)), files).unwrap();
        assert_eq!(usable(&self.catalog), before + evicted);
        let gone = self.notice_evictions();
        assert!(gone.iter().all(|key| ns.is_none_or(|ns| ns == key.0)), "{gone:?}");
        let left = |(key, block): &(&(u32, u32), &Block)| {
            ns.is_none_or(|ns| ns == key.0) && self.model.evictable(block)
        };
        let left = self.model.keys.iter().filter(left).count();
        assert!(evicted == files || left == 0, "{evicted} of {files}, {left} left");
    }

    /// Finds the keys that the catalog has evicted, and checks that it was allowed to.
    fn notice_evictions(&mut self) -> Vec<(u32, u32)> {
        let find =
            |ns: u32, number: u32| self.catalog.find(self.model.id(ns), &key(number)).unwrap();
        let gone = self.model.keys.iter().filter(|(at, block)| {
            block.stored && find(at.0, at.1) != Some(Hit::Stored(FileId(block.file)))
        });
        let gone: Vec<(u32, u32)> = gone.map(|(at, _)| *at).collect();
        let lsn = self.catalog.log.last().0;
        for at in &gone {
            assert!(self.model.evictable(&self.model.keys[at]), "{at:?} is in use");
            self.model.drop_key(*at, lsn);
        }
        gone
    }

    fn forget(&mut self, ns: u32) {
        let lsn = self.catalog.log.last().0;
        let keys: Vec<_> = self.model.keys.keys().filter(|key| key.0 == ns).copied().collect();
        keys.into_iter().for_each(|key| self.model.drop_key(key, lsn));
    }

    fn group(&mut self, max: usize) {
        if let Some(group) = self.catalog.pending(max) {
            if group.needs_snapshot {
                assert!(group.records.is_empty());
                return self.snapshot_instead(group.lsn);
            }
            let uses = self.limit.saturating_add(self.limit / 4 + 32);
            assert!(group.records.len() <= uses, "{} bytes waited", group.records.len());
            self.half.push((group.lsn.0, group.records.clone()));
            self.taken.push((group.lsn.0, group.records.clone()));
            if let Some((_, other)) = &mut self.other {
                other.push((group.lsn.0, group.records));
            }
        }
    }

    fn durable(&mut self) {
        if !self.taken.is_empty() {
            let (lsn, _) = self.taken.remove(0);
            self.catalog.durable(Lsn(lsn));
            self.model.durable = lsn;
        }
    }

    /// Writes a snapshot because records were dropped, and abandons the earlier groups.
    fn snapshot_instead(&mut self, lsn: Lsn) {
        let (mut half, mut cursor) = (Vec::new(), Some(SnapshotCursor::default()));
        while let Some(at) = cursor {
            let mut records = Vec::new();
            cursor = self.catalog.snapshot(at, 100, &mut records);
            half.push((lsn.0, records));
        }
        (self.half, self.other) = (half, None);
        self.taken.clear();
        self.catalog.durable(lsn);
        self.model.durable = lsn.0;
    }

    fn snapshot(&mut self, max: usize) {
        self.group(usize::MAX);
        let mut records = Vec::new();
        let cursor = self.other.as_ref().map_or(SnapshotCursor::default(), |(cursor, _)| *cursor);
        let next = self.catalog.snapshot(cursor, max, &mut records);
        let (cursor, half) = self.other.get_or_insert_default();
        half.push((self.catalog.log.last().0, records));
        match next {
            Some(next) => *cursor = next,
            // All of the other half is durable, and it becomes the active one.
            None => {
                while !self.taken.is_empty() {
                    self.durable();
                }
                self.half = self.other.take().unwrap().1;
            }
        }
    }

    /// Discards the state in memory: another catalog recovers.
    fn crash(&mut self, part: usize) {
        // Groups are written one after the other.
        let written = self
            .model
            .durable
            .max(self.taken.get(part % (self.taken.len() + 1)).map_or(0, |(lsn, _)| *lsn));
        self.half.retain(|(lsn, _)| *lsn <= written);
        let mut again = empty(self.policy);
        for (_, records) in &self.half {
            for record in Records::new(records) {
                again.apply(&record.unwrap()).unwrap();
            }
        }
        again.recovered();
        self.check_recovered(&again, written);
        self.adopt(again);
    }

    /// Checks that the recovered keys match the medium, and that every acknowledged key is found
    /// unless it was dropped since.
    fn check_recovered(&self, again: &Catalog, written: u64) {
        for (id, salt) in namespaces(again) {
            let ns = NamespaceId(id);
            for number in 0..KEYS {
                let found = again.find(ns, &key(number)).unwrap();
                let Some(found) = found else { continue };
                let Hit::Stored(file) = found else { panic!("{found:?}") };
                let content = self.model.medium[&file.0];
                assert_eq!((content.0, content.2), ((salt, id), number), "wrong bytes: {file}");
                let epoch = again.usage(ns).unwrap().epoch;
                assert_eq!(content.1, epoch, "bytes of another epoch in file {file}");
                let words: Vec<u32> = [(0, 0), (0, 1), (1, 0), (1, 1)]
                    .map(|(rank, row)| checksum(content, rank, row))
                    .to_vec();
                assert_eq!(again.checksums(file), words);
            }
        }
        for (lsn, (ns, number), content) in &self.model.commits {
            let now = self.model.keys.get(&(*ns, *number));
            let still = now.is_some_and(|block| block.stored && block.content == *content);
            if *lsn <= written && still {
                let found = again.find(self.model.id(*ns), &key(*number)).unwrap();
                assert!(found.is_some(), "the commit of {number} in {ns} is lost");
            }
        }
    }

    /// Continues with the recovered catalog. The model takes the state of the written records.
    fn adopt(&mut self, mut again: Catalog) {
        let medium = std::mem::take(&mut self.model.medium);
        let writes_ever = self.model.writes_ever;
        self.model = Model { medium, writes_ever, ..Model::default() };
        again.limit_pending(self.limit);
        // Records of the first ones may be lost.
        for salt in 0.. {
            if again.namespaces().count() == NAMESPACES as usize {
                break;
            }
            again.namespace(&descriptor(salt)).unwrap();
        }
        for (id, salt) in namespaces(&again) {
            let (ns, at) = (id % NAMESPACES, (id % NAMESPACES) as usize);
            (self.model.ids[at], self.model.salts[at]) = (id, salt);
            let usage = again.usage(NamespaceId(id)).unwrap();
            self.model.epochs[at] = usage.epoch;
            self.model.quotas[at] = usage.quota_files;
            self.model.weights[at] = usage.weight;
            for number in 0..KEYS {
                let found = again.find(NamespaceId(id), &key(number)).unwrap();
                let Some(Hit::Stored(FileId(file))) = found else { continue };
                let content = self.model.medium[&file];
                let block = Block { file, stored: true, content };
                self.model.keys.insert((ns, number), block);
            }
        }
        self.model.weights.iter_mut().for_each(|weight| *weight = (*weight).max(1));
        self.catalog = again;
        (self.held, self.writes, self.taken) = Default::default();
        self.other = None;
        // Positions count from the opening of the journal.
        self.half.iter_mut().for_each(|(lsn, _)| *lsn = 0);
    }

    fn check(&mut self) {
        let model = &self.model;
        let count = |holds: &dyn Fn(&Block) -> bool| {
            model.keys.values().filter(|block| holds(block)).count() as u32
        };
        let counts = self.catalog.counts();
        assert_eq!(counts.stored, count(&|block| block.stored));
        assert_eq!(counts.writing, count(&|block| !block.stored));
        assert_eq!(counts.active, count(&|block| block.stored && model.in_use(block.file)));
        assert_eq!(counts.evictable, count(&|block| model.evictable(block)));
        for ns in 0..NAMESPACES {
            let usage = self.catalog.usage(self.model.id(ns)).unwrap();
            let at = ns as usize;
            let (held, writing) = (model.held(ns), usage.stored + usage.writing);
            assert_eq!(usage.doomed + writing, held, "namespace {ns}");
            let known = |(key, block): &(&(u32, u32), &Block)| key.0 == ns && block.stored;
            let known = model.keys.iter().filter(known).count() as u32;
            assert_eq!(usage.recent + usage.idle, known);
            assert_eq!(
                (usage.epoch, usage.quota_files, usage.weight),
                (model.epochs[at], model.quotas[at], model.weights[at])
            );
            for number in 0..KEYS {
                let found = self.catalog.find(self.model.id(ns), &key(number)).unwrap();
                let expected = model.keys.get(&(ns, number)).map(|block| match block.stored {
                    true => Hit::Stored(FileId(block.file)),
                    false => Hit::Writing(FileId(block.file)),
                });
                assert_eq!(found, expected, "key {number} of {ns}");
            }
        }
    }

    /// Checks that all files are free once all references are released and the journal is durable.
    fn drain(&mut self) {
        while !self.held.is_empty() {
            self.step(&Step::Release(0));
        }
        while !self.writes.is_empty() {
            self.step(&Step::Abort(0));
        }
        (0..NAMESPACES).for_each(|ns| self.step(&Step::Clear(ns)));
        self.step(&Step::Evict(None, FILES));
        self.group(usize::MAX);
        while !self.taken.is_empty() {
            self.durable();
        }
        assert_eq!(self.catalog.counts().free, FILES);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn against_the_model(
        steps in steps(), policy in 0..PolicyKind::ALL.len(), limit in limits(),
    ) {
        run(&steps, policy, limit);
    }
}

/// Limits on queued bytes: some records, or all.
fn limits() -> impl Strategy<Value = usize> {
    prop_oneof![Just(usize::MAX), 100..2000usize]
}

fn run(steps: &[Step], policy: usize, limit: usize) {
    let mut both = Both::new(PolicyKind::ALL[policy], limit);
    for step in steps {
        both.step(step);
    }
    both.drain();
}
