//! Two owners of one medium, by turns.

use std::sync::{Arc, Mutex};

use nvme_spec::ids::Lba;

use super::*;
use crate::{
    BlockKey, Catalog, CatalogError, Codec, DeviceIdentity, DurableCatalog, DurableConfig, KvShape,
    Namespace, NamespaceId, NotDurable, OnDevice, Plan, PolicyKind, Region, Seal, StoreId,
    Superblock, block_io::tests::Medium, format_devices,
};

const BYTES: u64 = 16 << 20;

fn owner(number: u8) -> Owner {
    let host = format!("host{number}");
    Owner { id: [number; 16], host, pid: u32::from(number), since: 1_764_320_400 }
}

fn formatted() -> Medium {
    let medium = Medium::new("shared", BYTES, 512);
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
        files_max: Some(64),
        capacity_bytes: None,
        group: None,
    };
    format_devices(&mut [&mut medium.clone()], &mut plan.superblocks().unwrap()).unwrap();
    medium
}

/// Counts reads.
struct Counted(Medium, Arc<Mutex<u64>>);

impl BlockIo for Counted {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn lba_bytes(&self) -> u32 {
        self.0.lba_bytes()
    }

    fn bytes(&self) -> u64 {
        BlockIo::bytes(&self.0)
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        *self.1.lock().unwrap() += 1;
        self.0.read(offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        self.0.write(offset, from, fua)
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        self.0.flush()
    }
}

/// Opens the catalog as this owner, and returns it with a count of its reads.
fn open(medium: &Medium, owner: &Owner) -> (DurableCatalog, Arc<Mutex<u64>>) {
    owner.claim(&mut medium.clone()).unwrap();
    let Ok(OnDevice::Ours(superblock)) = Superblock::read(&mut medium.clone()) else { panic!() };
    let reads = Arc::new(Mutex::new(0));
    let counted = Counted(medium.clone(), reads.clone());
    let time = || Time(Box::new(|| 0));
    let io = Fenced::new(counted, owner.clone(), time(), 1_000);
    let (policy, write_budget, chance) = (PolicyKind::Lru, None, 7);
    let config =
        DurableConfig { policy, write_budget, chance, time: time(), seal: Seal::default() };
    (DurableCatalog::open(Box::new(io), *superblock, config, |_, _| {}).unwrap(), reads)
}

fn space(catalog: &DurableCatalog) -> NamespaceId {
    catalog.with(|catalog| catalog.namespace(&Namespace::default())).unwrap()
}

fn key(number: u8) -> BlockKey {
    BlockKey([number; 32])
}

/// Commits a block, and makes it durable.
fn store(catalog: &DurableCatalog, number: u8) -> Result<(), NotDurable> {
    let space = space(catalog);
    let commit = |catalog: &mut Catalog| -> Result<(), CatalogError> {
        let write = catalog.begin(space, &[key(number)])?;
        catalog.written(write.id, 0, &[])?;
        catalog.commit(write.id).map(|_| ())
    };
    catalog.with(commit).unwrap();
    catalog.sync()
}

fn stored(catalog: &DurableCatalog) -> Vec<u8> {
    let space = space(catalog);
    let is_stored =
        |number: &u8| catalog.with(|all| all.lookup(space, &[key(*number)])).unwrap() > 0;
    (0..64).filter(is_stored).collect()
}

/// The older one commits before and after the other one takes over, at its first commit or in the
/// middle of its compactions: what it was told to be durable is found, and nothing else of it is.
#[test]
fn an_owner_that_comes_back_stores_nothing_and_is_told_by_whom() {
    for commits in [1, 2, 40] {
        let medium = formatted();
        let (older, _) = open(&medium, &owner(1));
        for number in 0..commits {
            store(&older, number).unwrap();
        }
        let (newer, _) = open(&medium, &owner(2));
        assert_eq!(stored(&newer), (0..commits).collect::<Vec<_>>());
        store(&newer, 50).unwrap();
        let writes = medium.written_bytes();
        let error = store(&older, 60).unwrap_err().to_string();
        for part in ["process 2 on host2, since 2025-11-28 09:00:00 UTC", "took the store over"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(older.seal().check().is_err() && older.sync().is_err() && older.close().is_err());
        assert_eq!(medium.written_bytes(), writes, "the older one wrote");
        store(&newer, 51).unwrap();
        newer.close().unwrap();
        let (again, _) = open(&medium, &owner(3));
        let all: Vec<u8> = (0..commits).chain([50, 51]).collect();
        assert_eq!(stored(&again), all);
    }
}

#[test]
fn a_formatted_store_has_no_owner() {
    let medium = formatted();
    let (older, _) = open(&medium, &owner(1));
    let fresh = formatted().copy();
    let mut bytes = vec![0; BYTES as usize];
    fresh.clone().read(0, &mut bytes).unwrap();
    medium.clone().write(0, &bytes, true).unwrap();
    let error = store(&older, 1).unwrap_err().to_string();
    assert!(error.contains("formatting"), "{error}");
}

#[test]
fn a_commit_costs_one_read_of_an_lba() {
    let (catalog, reads) = open(&formatted(), &owner(1));
    for number in 0..20 {
        let before = *reads.lock().unwrap();
        store(&catalog, number).unwrap();
        assert_eq!(*reads.lock().unwrap() - before, 1);
    }
}

/// The other one claims while a write is under way. It waits before it reads: a write in time is
/// seen by it, and a late one does not count.
#[test]
fn a_write_that_takes_long_is_checked_again() {
    struct Slow(Medium);
    impl BlockIo for Slow {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn lba_bytes(&self) -> u32 {
            self.0.lba_bytes()
        }
        fn bytes(&self) -> u64 {
            BlockIo::bytes(&self.0)
        }
        fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
            self.0.read(offset, into)
        }
        fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
            self.0.write(offset, from, fua)?;
            owner(2).claim(&mut self.0)
        }
        fn flush(&mut self) -> Result<(), BlockError> {
            self.0.flush()
        }
    }
    for (step, is_late) in [(500, false), (501, true)] {
        let medium = formatted();
        owner(1).claim(&mut medium.clone()).unwrap();
        let now = Mutex::new(0);
        let time = Time(Box::new(move || {
            let mut now = now.lock().unwrap();
            *now += step;
            *now
        }));
        let mut io = Fenced::new(Slow(medium), owner(1), time, 1_000);
        let written = io.write(4 << 20, &[0; 512], true);
        assert_eq!(written.is_err(), is_late, "{written:?}");
        assert!(io.write(4 << 20, &[0; 512], true).is_err());
    }
}

#[test]
fn an_owner_is_alive_while_something_moves() {
    let medium = formatted();
    let see = || Sighting::take(&mut medium.clone()).unwrap();
    let nobody = see();
    assert_eq!((&nobody.owner, nobody.living(&see())), (&None, None));
    owner(1).claim(&mut medium.clone()).unwrap();
    // One that came meanwhile.
    assert_eq!(nobody.living(&see()), Some(&owner(1)));
    let first = see();
    assert_eq!((first.owner.as_ref(), first.living(&see())), (Some(&owner(1)), None));
    owner(1).pulse(&mut medium.clone(), 1).unwrap();
    assert_eq!(first.living(&see()), Some(&owner(1)));
    let second = see();
    assert_eq!(second.living(&see()), None, "it has stopped");
    owner(1).pulse(&mut medium.clone(), 2).unwrap();
    assert_eq!(second.living(&see()), Some(&owner(1)));
    // A late pulse of an earlier owner hides no claim.
    owner(2).claim(&mut medium.clone()).unwrap();
    owner(1).pulse(&mut medium.clone(), 3).unwrap();
    owner(2).check(&mut medium.clone()).unwrap();
    // One that has ended is not alive, and only its own claim is removed.
    assert!(owner(1).release(&mut medium.clone()).is_err());
    owner(2).release(&mut medium.clone()).unwrap();
    assert_eq!(second.living(&see()), None);
    let by = |error| match error {
        OwnerError::Lost { by, .. } => by,
        OwnerError::Block(error) => panic!("{error}"),
    };
    assert_eq!(by(owner(1).check(&mut medium.clone()).unwrap_err()), Some(owner(2)));
}

#[test]
fn a_claim_keeps_what_fits_and_a_damaged_one_is_none() {
    let medium = formatted();
    let long = Owner { host: "é".repeat(60), ..owner(1) };
    long.claim(&mut medium.clone()).unwrap();
    let found = Sighting::take(&mut medium.clone()).unwrap().owner.unwrap();
    assert_eq!(found.host, "é".repeat(32));
    long.check(&mut medium.clone()).unwrap();
    medium.corrupt(CLAIM + 48, |bytes| bytes[0] ^= 1);
    assert_eq!(Sighting::take(&mut medium.clone()).unwrap().owner, None);
}

#[test]
fn times_are_dates() {
    for (since, text) in [
        (0, "1970-01-01 00:00:00"),
        (951_868_799, "2000-02-29 23:59:59"),
        (951_868_800, "2000-03-01 00:00:00"),
        (1_735_689_599, "2024-12-31 23:59:59"),
        (4_107_542_400, "2100-03-01 00:00:00"),
    ] {
        let shown = Owner { since, ..owner(1) }.to_string();
        assert_eq!(shown, format!("process 1 on host1, since {text} UTC"));
    }
    assert!(Owner { since: u64::MAX, ..owner(1) }.to_string().ends_with("UTC"));
}
