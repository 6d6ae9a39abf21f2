//! The index against a model that does everything the slow and obvious way.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// A key with this number.
fn name(number: u128) -> BlockKey {
    let mut digest = [0; 32];
    digest[..16].copy_from_slice(&number.to_le_bytes());
    BlockKey(digest)
}

const FILES: u32 = 12;
const KEYS: u128 = 20;

/// key -> (file, stored); references by file; order of eviction, next victim first.
#[derive(Debug, Default)]
struct Model {
    keys: BTreeMap<u128, (u32, bool)>,
    refs: BTreeMap<u32, u32>,
    order: Vec<u32>,
}

impl Model {
    fn key_of(&self, file: u32) -> Option<u128> {
        self.keys.iter().find(|(_, entry)| entry.0 == file).map(|(key, _)| *key)
    }

    fn evictable(&self, file: u32) -> bool {
        let stored = self.key_of(file).map(|key| self.keys[&key]);
        matches!(stored, Some((_, true))) && !self.refs.contains_key(&file)
    }

    /// Puts `file` where it belongs after a change: at the end if it just became evictable.
    fn touch(&mut self, file: u32) {
        let listed = self.order.contains(&file);
        match (listed, self.evictable(file)) {
            (false, true) => self.order.push(file),
            (true, false) => self.order.retain(|other| *other != file),
            _ => {}
        }
    }

    fn reference(&mut self, file: u32) {
        *self.refs.entry(file).or_default() += 1;
        self.touch(file);
    }

    /// Whether the file is free now.
    fn release(&mut self, file: u32) -> bool {
        let refs = self.refs.get_mut(&file).unwrap();
        *refs -= 1;
        if *refs == 0 {
            self.refs.remove(&file);
        }
        self.touch(file);
        !self.refs.contains_key(&file) && self.key_of(file).is_none()
    }

    fn invalidate(&mut self, file: u32) -> bool {
        let Some(key) = self.key_of(file) else { return false };
        self.keys.remove(&key);
        self.touch(file);
        !self.refs.contains_key(&file)
    }

    fn counts(&self) -> IndexCounts {
        let stored = self.keys.values().filter(|entry| entry.1).count() as u32;
        IndexCounts {
            stored,
            writing: self.keys.len() as u32 - stored,
            doomed: self.refs.keys().filter(|f| self.key_of(**f).is_none()).count() as u32,
            referenced: self.refs.len() as u32,
            evictable: self.order.len() as u32,
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Lookup(Vec<u128>),
    Release(usize),
    Begin(Vec<u128>),
    Settle(usize),
    Abandon(usize),
    Invalidate(u32),
    Evict,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let keys =
        || (0..KEYS, 1..6u128).prop_map(|(first, n)| (first..(first + n).min(KEYS)).collect());
    let step = prop_oneof![
        4 => keys().prop_map(Step::Lookup),
        4 => any::<usize>().prop_map(Step::Release),
        4 => keys().prop_map(Step::Begin),
        4 => any::<usize>().prop_map(Step::Settle),
        1 => any::<usize>().prop_map(Step::Abandon),
        1 => (0..FILES).prop_map(Step::Invalidate),
        2 => Just(Step::Evict),
    ];
    proptest::collection::vec(step, 0..120)
}

struct Both {
    index: Index,
    model: Model,
    free: Vec<u32>,
    held: Vec<Vec<FileId>>,
    writing: Vec<Vec<Position>>,
}

impl Both {
    fn new() -> Self {
        Self {
            index: Index::new(FILES),
            model: Model::default(),
            free: (0..FILES).collect(),
            held: Vec::new(),
            writing: Vec::new(),
        }
    }

    fn step(&mut self, step: Step) {
        let mut freed = Vec::new();
        let mut expected = Vec::new();
        match step {
            Step::Lookup(keys) => self.lookup(&keys),
            Step::Begin(keys) => self.begin(&keys),
            Step::Release(at) if !self.held.is_empty() => {
                let files = self.held.swap_remove(at % self.held.len());
                self.index.release(&files, &mut freed);
                expected = files.iter().rev().map(|f| f.0).collect();
                expected.retain(|file| self.model.release(*file));
            }
            Step::Settle(at) if !self.writing.is_empty() => {
                let request = self.writing.swap_remove(at % self.writing.len());
                if request.iter().any(|p| p.own && self.model.key_of(p.file.0).is_none()) {
                    // One of its files was invalidated meanwhile: only abandoning is possible.
                    self.writing.push(request);
                    return;
                }
                self.index.settle(&request, &mut freed);
                for Position { file, own } in request.into_iter().rev() {
                    if own {
                        let key = self.model.key_of(file.0).unwrap();
                        self.model.keys.get_mut(&key).unwrap().1 = true;
                        self.model.touch(file.0);
                    } else if self.model.release(file.0) {
                        expected.push(file.0);
                    }
                }
            }
            Step::Abandon(at) if !self.writing.is_empty() => {
                let request = self.writing.swap_remove(at % self.writing.len());
                self.index.abandon(&request, &mut freed);
                for Position { file, own } in request.into_iter().rev() {
                    let model = &mut self.model;
                    if if own { model.invalidate(file.0) } else { model.release(file.0) } {
                        expected.push(file.0);
                    }
                }
            }
            // The owner of a file being written would not know: only stored ones.
            Step::Invalidate(file) if self.index.is_stored(FileId(file)) => {
                self.index.invalidate(FileId(file), &mut freed);
                expected.extend(Some(file).filter(|file| self.model.invalidate(*file)));
            }
            Step::Evict => {
                let victim = self.index.evict();
                assert_eq!(victim.map(|f| f.0), self.model.order.first().copied());
                if let Some(file) = victim {
                    freed.push(file);
                    self.model.invalidate(file.0);
                    expected.push(file.0);
                }
            }
            _ => {}
        }
        let freed: Vec<u32> = freed.iter().map(|f| f.0).collect();
        assert_eq!(freed, expected);
        self.free.extend(freed);
    }

    fn lookup(&mut self, keys: &[u128]) {
        let mut files = Vec::new();
        let wanted: Vec<BlockKey> = keys.iter().map(|k| name(*k)).collect();
        let n = self.index.lookup(&wanted, &mut files);
        let stored = |key: &&u128| self.model.keys.get(key).is_some_and(|entry| entry.1);
        let expected: Vec<u32> =
            keys.iter().take_while(stored).map(|key| self.model.keys[key].0).collect();
        assert_eq!(files.iter().map(|f| f.0).collect::<Vec<_>>(), expected);
        assert_eq!(n, expected.len());
        expected.into_iter().for_each(|file| self.model.reference(file));
        self.held.push(files);
    }

    fn begin(&mut self, keys: &[u128]) {
        let mut request = Vec::new();
        for key in keys {
            let position = if let Some(found) = self.index.find(name(*key)) {
                self.index.reference(found.file());
                self.model.reference(found.file().0);
                Position { file: found.file(), own: false }
            } else {
                let Some(file) = self.free.pop() else { break };
                self.index.begin(name(*key), FileId(file));
                self.model.keys.insert(*key, (file, false));
                Position { file: FileId(file), own: true }
            };
            request.push(position);
        }
        self.writing.push(request);
    }
}

proptest! {
    #[test]
    fn against_the_model(steps in steps()) {
        let mut both = Both::new();
        for step in steps {
            both.step(step);
            prop_assert_eq!(both.index.counts(), both.model.counts());
            for key in 0..KEYS {
                let found = both.index.find(name(key));
                let expected = both.model.keys.get(&key).map(|(file, stored)| match stored {
                    true => Found::Stored(FileId(*file)),
                    false => Found::Writing(FileId(*file)),
                });
                prop_assert_eq!(found, expected);
            }
            let known = both.model.keys.len();
            let doomed = both.index.counts().doomed as usize;
            prop_assert_eq!(both.free.len() + known + doomed, FILES as usize);
        }
        // Nothing is lost: once everybody let go, all of it can be evicted.
        while !both.held.is_empty() {
            both.step(Step::Release(0));
        }
        while !both.writing.is_empty() {
            both.step(Step::Abandon(0));
        }
        while let Some(file) = both.index.evict() {
            both.free.push(file.0);
        }
        both.free.sort_unstable();
        prop_assert_eq!(both.free, (0..FILES).collect::<Vec<_>>());
    }
}

fn stored(index: &mut Index, keys: std::ops::Range<u128>, file: u32) {
    let positions: Vec<Position> = keys
        .clone()
        .zip(file..)
        .map(|(key, file)| {
            index.begin(name(key), FileId(file));
            Position { file: FileId(file), own: true }
        })
        .collect();
    index.settle(&positions, &mut Vec::new());
}

#[test]
fn a_request_is_evicted_from_its_tail() {
    let mut index = Index::new(8);
    stored(&mut index, 0..4, 0);
    let order: Vec<u32> = std::iter::from_fn(|| index.evict()).map(|f| f.0).collect();
    assert_eq!(order, [3, 2, 1, 0]);
}

#[test]
fn a_longer_request_keeps_the_head_it_found_newer_than_its_own_tail() {
    let mut index = Index::new(8);
    stored(&mut index, 0..2, 0);
    let mut request = Vec::new();
    for key in 0..2 {
        let file = index.find(name(key)).unwrap().file();
        index.reference(file);
        request.push(Position { file, own: false });
    }
    for (key, file) in [(2, 5), (3, 6)] {
        index.begin(name(key), FileId(file));
        request.push(Position { file: FileId(file), own: true });
    }
    index.settle(&request, &mut Vec::new());
    let order: Vec<u32> = std::iter::from_fn(|| index.evict()).map(|f| f.0).collect();
    assert_eq!(order, [6, 5, 1, 0]);
}

#[test]
fn using_a_request_makes_it_the_last_to_go() {
    let mut index = Index::new(8);
    stored(&mut index, 0..2, 0);
    stored(&mut index, 10..12, 2);
    let mut files = Vec::new();
    assert_eq!(index.lookup(&[name(0), name(1), name(2)], &mut files), 2);
    index.release(&files, &mut Vec::new());
    assert_eq!(index.evict(), Some(FileId(3)));
}
