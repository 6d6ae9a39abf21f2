//! Changes that other threads make to a catalog while its journal is written: here, at each lock.

use std::cell::{Cell, RefCell};

use crate::{
    BlockError, BlockIo, BlockKey, CatalogConfig, Codec, DeviceIdentity, KvShape, NamespaceId,
    OnDevice, Plan, PolicyKind, Region, StoreId, Superblock, format_devices,
};
use nvme_spec::ids::Lba;

use super::*;

const FILES: u32 = 2048;
/// Room for the journal of each test. Unwritten bytes take no memory.
const BYTES: u64 = 256 << 20;

/// A medium without faults.
#[derive(Clone)]
struct Bytes(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl BlockIo for Bytes {
    fn name(&self) -> &str {
        "bytes"
    }

    fn lba_bytes(&self) -> u32 {
        512
    }

    fn bytes(&self) -> u64 {
        BYTES
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        into.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8], _: bool) -> Result<(), BlockError> {
        self.0.lock().unwrap()[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        Ok(())
    }
}

fn formatted(files: u32) -> Bytes {
    let io = Bytes(std::sync::Arc::new(std::sync::Mutex::new(vec![0; BYTES as usize])));
    let identity = DeviceIdentity {
        model: [b' '; 40],
        serial: [b'1'; 20],
        nsid: 1,
        nguid: [0; 16],
        eui64: [0; 8],
        lba_bytes: 512,
        namespace_lbas: BYTES >> 9,
    };
    let plan = Plan {
        store: StoreId([1; 16]),
        rank: 0,
        ranks: 1,
        devices: &[(identity, Region { first: Lba(0), lbas: BYTES >> 9, lba_shift: 9 })],
        shape: KvShape { layers: 1, segments: 1, object_bytes: 512, block_tokens: 16 },
        codec: Codec::None,
        catalog: true,
        data: false,
        checksums: false,
        namespaces_max: 2,
        files_max: Some(files),
        capacity_bytes: None,
        group: None,
    };
    format_devices(&mut [&mut io.clone()], &mut plan.superblocks().unwrap()).unwrap();
    io
}

fn open(io: &Bytes) -> (Catalog, JournalWriter) {
    let Ok(OnDevice::Ours(superblock)) = Superblock::read(&mut io.clone()) else { panic!() };
    let mut catalog = Catalog::new(CatalogConfig {
        files: superblock.layout.files,
        file_bytes: 1,
        ranks: 1,
        words_per_file: 0,
        namespaces_max: 2,
        journal: true,
        files_ahead: 0,
        seed: 1,
        policy: PolicyKind::Lru,
        write_budget: None,
    });
    let journal = Journal::open(
        Box::new(io.clone()),
        *superblock,
        |record| catalog.apply(&record),
        |_, _| {},
    )
    .unwrap();
    catalog.recovered();
    catalog.limit_pending(journal.append_bytes_max());
    (catalog, JournalWriter::new(journal))
}

fn keys() -> Vec<BlockKey> {
    (0..FILES)
        .map(|number| {
            let mut key = [7; 32];
            key[..4].copy_from_slice(&number.to_le_bytes());
            BlockKey(key)
        })
        .collect()
}

fn store(catalog: &mut Catalog, keys: &[BlockKey]) {
    let write = catalog.begin(NamespaceId(0), keys).unwrap();
    catalog.written(write.id, 0, &[]).unwrap();
    catalog.commit(write.id).unwrap();
}

/// Makes a number of records each time that the catalog is unlocked. With few of them, and with
/// many more than the journal takes between two pieces of the state, a write ends, and
/// everything done before it is permanent.
#[test]
fn a_write_ends_whatever_is_done_meanwhile() {
    for (records, rounds) in [(0, 400), (2, 400), (60, 100), (FILES / 5, 30)] {
        let io = formatted(FILES);
        let (catalog, mut writer) = open(&io);
        let (catalog, keys) = (RefCell::new(catalog), keys());
        let space = catalog.borrow_mut().namespace(&Default::default()).unwrap();
        assert_eq!(space, NamespaceId(0));
        store(&mut catalog.borrow_mut(), &keys);
        for round in 0..rounds {
            let some = &keys[round * 5 % keys.len()..];
            let some = &some[..some.len().min(5)];
            match round % 2 {
                0 => _ = catalog.borrow_mut().remove(space, some).unwrap(),
                _ => store(&mut catalog.borrow_mut(), some),
            }
            writer
                .write(|act| {
                    act(&mut catalog.borrow_mut());
                    for record in 0..records {
                        catalog.borrow_mut().set_weight(space, 1 + record).unwrap();
                    }
                })
                .unwrap();
            let stored = catalog.borrow().counts().stored;
            if round % 10 == 8 {
                let (again, _) = open(&io);
                assert_eq!(again.counts().stored, stored, "{records} records, round {round}");
            }
        }
        let counts = writer.journal.as_ref().unwrap().counts();
        assert!(counts.compactions > 0 || records < 60, "{records} records: {counts:?}");
    }
}

/// A large store with few files: a compaction searches all of it, several times. No commit waits
/// for that, and it ends.
#[test]
fn no_write_waits_while_a_compaction_searches() {
    let io = formatted(1 << 18);
    let (mut catalog, mut writer) = open(&io);
    let (space, keys) = (catalog.namespace(&Default::default()).unwrap(), keys());
    store(&mut catalog, &keys);
    let catalog = RefCell::new(catalog);
    writer.write(|act| act(&mut catalog.borrow_mut())).unwrap();
    writer.journal.as_mut().unwrap().begin_compaction().unwrap();
    writer.compacting = Some(SnapshotCursor::default());
    let (mut most, mut writes) = (0, 0);
    while writer.compacting.is_some() {
        catalog.borrow_mut().set_weight(space, 1).unwrap();
        let locked = Cell::new(0);
        writer
            .write(|act| {
                locked.set(locked.get() + 1);
                act(&mut catalog.borrow_mut());
            })
            .unwrap();
        (most, writes) = (locked.get().max(most), writes + 1);
    }
    // Locks for the records, a piece, and marking both permanent.
    assert!(most <= 4, "a write locked the catalog {most} times");
    assert!((100..3000).contains(&writes), "{writes} writes");
    assert_eq!(open(&io).0.counts().stored, FILES);
}
