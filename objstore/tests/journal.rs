//! The journal of an open store: it continues when it is full, and is rewritten when the device
//! changes bytes of it.

use crate::stack;

use std::sync::Arc;

use kv_catalog::{OnDevice, Superblock};
use nvme_driver::{Controller, ControllerOptions};
use nvme_emu::{EmuConfig, EmuDomain, MemoryMedia, SimClock};
use objstore::{
    BlockKey, Format, KvShape, Medium, Namespace, Salvage, Store, StoreConfig, StoreDevice,
    StoreError, StoreOptions,
};
use ripieno_testkit::{Drives, KvMemory, format, inline_executor};
use stack::{Stack, blocks, keys};

/// A small shape, so that a half of the journal is small, too: 64 KiB.
const SHAPE: KvShape = KvShape { layers: 1, segments: 1, object_bytes: 4096, block_tokens: 16 };
const FILES: u32 = 64;
const LBA: u32 = 4096;
/// Offset of half A of the journal.
const JOURNAL: u64 = 1 << 20;

/// A device that outlives the stores on it.
struct Shelf {
    bytes: MemoryMedia,
}

impl Shelf {
    fn formatted() -> Self {
        let shelf = Self { bytes: MemoryMedia::new(16 << 20).unwrap() };
        let capacity_bytes = Some(u64::from(FILES * SHAPE.object_bytes));
        let format = Format { namespaces_max: 2, capacity_bytes, ..format(SHAPE) };
        Store::format(&shelf.device().0, &format).unwrap();
        shelf
    }

    fn device(&self) -> (Vec<StoreDevice>, Arc<EmuDomain>, Arc<SimClock>) {
        let clock = SimClock::new(1);
        let config = EmuConfig::new("drive0").namespace(self.bytes.clone(), LBA);
        let drives = Drives::simulated(EmuDomain::new("shelf"), vec![config], &clock);
        let attach =
            |bus| Controller::attach(bus, clock.clone(), ControllerOptions::default()).unwrap();
        let devices = drives.buses().into_iter().map(attach).map(StoreDevice::new).collect();
        (devices, drives.domain, clock)
    }

    fn try_open(&self) -> Result<Stack, StoreError> {
        let (devices, domain, clock) = self.device();
        let kv = KvMemory::new(&*domain, SHAPE, FILES);
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor: inline_executor(clock.clone()),
            shape: SHAPE,
            namespace: Namespace::default(),
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions { virtual_time: true, ..StoreOptions::default() },
        })?;
        Ok(Stack { store, shape: SHAPE, kv, domain, emus: Vec::new(), clock })
    }

    fn open(&self) -> Stack {
        self.try_open().unwrap()
    }

    /// Another device with the same bytes.
    fn copy(&self) -> Self {
        let mut all = vec![0; 16 << 20];
        self.bytes.peek(0, &mut all).unwrap();
        let bytes = MemoryMedia::new(all.len() as u64).unwrap();
        bytes.poke(0, &all).unwrap();
        Self { bytes }
    }

    /// Returns the superblock and the media, without opening the store.
    fn superblock(&self) -> (Superblock, Vec<Medium>) {
        let mut media = Store::media(&self.device().0).unwrap();
        let found = Superblock::read(&mut *media[0].io).unwrap();
        let OnDevice::Ours(superblock) = found else { panic!("{found:?}") };
        (*superblock, media)
    }

    /// Corrupts the journal's halves on the medium: one sector of each group from `from` on.
    fn damage(&self, from: u64, groups: u64) {
        for group in 0..groups {
            self.bytes.poke(JOURNAL + from + group * u64::from(LBA), &[0xee; 512]).unwrap();
        }
    }
}

/// Checks that the store holds these blocks: in this process, and after reopening.
fn holds(shelf: &Shelf, mut stack: Stack, stored: &[BlockKey]) {
    assert_eq!(stack.get(stored, 0), stored.len());
    drop(stack);
    let mut again = shelf.open();
    assert_eq!(again.get(stored, 0), stored.len());
}

/// More records than a half of the journal takes, without any commit meanwhile.
#[test]
fn settings_without_a_commit_fill_no_journal() {
    let shelf = Shelf::formatted();
    let mut stack = shelf.open();
    for weight in 1..=100_000 {
        stack.store.set_weight(weight).unwrap();
    }
    stack.store.sync_journal().unwrap();
    let stored = keys(0..8);
    assert_eq!(stack.put(&stored, 0), 8);
    assert_eq!(stack.store.usage().unwrap().weight, 100_000);
    holds(&shelf, stack, &stored);
    assert_eq!(shelf.open().store.usage().unwrap().weight, 100_000);
}

/// Uses of files are records, too. Uses of a run are one record, so each block is used separately.
#[test]
fn lookups_alone_fill_no_journal() {
    let shelf = Shelf::formatted();
    let mut stack = shelf.open();
    let stored = keys(0..FILES / 2);
    stack.put(&stored, 0);
    for round in 0..20_000 {
        let at = round * 7 % stored.len();
        // A prefix of one block: every other block has its own lookup.
        drop(stack.store.lookup(&stored[at..=at]).unwrap());
    }
    stack.store.sync_journal().unwrap();
    holds(&shelf, stack, &stored);
}

/// Evictions wait for their records; a store that is constantly overwritten has many.
#[test]
fn files_are_free_again_after_records_that_were_too_many() {
    let shelf = Shelf::formatted();
    let mut stack = shelf.open();
    for round in 0..20u32 {
        let some = keys(round * FILES..(round + 1) * FILES);
        (1..2500).for_each(|weight| stack.store.set_weight(weight).unwrap());
        // A request that finds no file waits for the journal, and then gets one.
        let mut accepted = 0;
        for part in some.chunks(8) {
            let save = stack.store.allocate(part, &blocks(0, part.len())).unwrap();
            let part = part.to_vec();
            part.iter().zip(blocks(0, 8)).for_each(|(key, block)| stack.fill(block, *key));
            stack.write_all(&save).unwrap();
            accepted += stack.store.commit(save).unwrap().accepted;
            (1..5).for_each(|weight| stack.store.set_weight(weight).unwrap());
        }
        assert_eq!(accepted, FILES as usize, "round {round}");
        (1..5000).for_each(|weight| stack.store.set_weight(weight).unwrap());
    }
}

#[test]
fn a_journal_that_rots_is_written_anew_while_the_store_is_open() {
    let shelf = Shelf::formatted();
    let mut stack = shelf.open();
    let (many, more) = (keys(0..20), keys(20..30));
    stack.put(&many, 0);
    stack.store.sync_journal().unwrap();
    assert_eq!(stack.store.verify_journal(true).unwrap(), None);
    shelf.damage(0, 2);
    let damage = stack.store.verify_journal(false).unwrap().expect("it is damaged").to_string();
    assert!(damage.contains("half A of the journal is missing or damaged"), "{damage}");
    assert!(damage.contains("ripieno fsck --salvage"), "{damage}");
    let refused = shelf.try_open().map(drop).unwrap_err().to_string();
    assert!(refused.contains("is missing or damaged") && refused.contains("fsck"), "{refused}");
    // Records written meanwhile follow the damage.
    stack.put(&more, 0);
    assert!(stack.store.verify_journal(true).unwrap().is_some());
    assert_eq!(stack.store.verify_journal(true).unwrap(), None, "half B is whole");
    assert_eq!(stack.get(&more, 0), 10);
    holds(&shelf, stack, &keys(0..30));
}

/// Salvage keeps the blocks of a store with a damaged journal, except those recorded only in the
/// damaged group; a file that was rewritten since holds no known block.
#[test]
fn blocks_are_kept_whose_data_proves_what_they_are() {
    let shelf = Shelf::formatted();
    let mut stack = shelf.open();
    // One group of the journal for each of these, behind the first one.
    let old = keys(0..4);
    stack.put(&old, 0);
    stack.put(&keys(10..16), 0);
    stack.put(&keys(20..26), 0);
    // The last file of the old ones is evicted, and holds another block.
    stack.store.remove(&old[3..]).unwrap();
    stack.store.sync_journal().unwrap();
    let all = u64::from(FILES) - 15;
    let filler = keys(1000..1000 + all as u32);
    stack.put(&filler, 0);
    stack.store.close().unwrap();
    let end = shelf.superblock().0.journal.unwrap().certain_bytes;
    assert!(end >= 6 * u64::from(LBA), "{end}");
    let groups = end / u64::from(LBA);
    let mut given_up = 0;
    for (damaged, count) in (0..groups).map(|at| (at, 1)).chain([(groups - 2, 2)]) {
        let copy = shelf.copy();
        copy.damage(damaged * u64::from(LBA), count);
        assert!(copy.try_open().is_err());
        let (superblock, mut media) = copy.superblock();
        let mut salvage = Salvage::read(&mut media[0], &superblock, |_, _| {}).unwrap();
        let early = Salvage::read(&mut media[0], &superblock, |_, _| {}).unwrap();
        let error = early.write(&mut media[0]).unwrap_err().to_string();
        assert!(error.contains("rank 0 was not read"), "{error}");
        salvage.verify(&mut media, &superblock, |done, all| assert!(done <= all)).unwrap();
        let kept = salvage.kept();
        let lost: Vec<BlockKey> = salvage.lost().iter().map(|lost| lost.key).collect();
        salvage.write(&mut media[0]).unwrap();
        drop(media);
        let mut again = copy.open();
        let mut found = 0;
        for key in keys(0..26).into_iter().chain(filler.clone()) {
            // Every byte is compared.
            found += again.get(&[key], 0);
        }
        assert_eq!(found as u32, kept, "group {damaged}");
        assert!(lost.iter().all(|lost| again.store.peek(&[*lost]) == 0));
        given_up += lost.len();
        assert_eq!(again.put(&keys(40..44), 0), 4, "it takes more");
    }
    assert_eq!(given_up, 1, "the one whose eviction and successor are not known");
}
