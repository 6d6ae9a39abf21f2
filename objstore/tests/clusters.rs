//! Clusters of KV entries: their bytes, their places, and the commands that read them.

use std::collections::BTreeSet;

use crate::{shelf, stack};

use kv_swarm::{Cluster, ClusterId, Clusters, Entry, Place, Placement, Read};
use nvme_emu::{EmuCounters, FaultAction, FaultRule, FaultWhen, LbaRange};
use objstore::{
    BlockKey, ClusterCopies, DeviceIndex, FileId, Format, Geometry, KeyChain, KvShape, Layer,
    Order, Row, StoreError, StoreOptions, StoredClusters,
};
use proptest::prelude::*;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::SliceRandom as _};
use ripieno_testkit::format;
use shelf::{Shelf, crash};
use stack::{Plan, READ, Stack, blocks};

/// An entry: K and V of a token in a layer.
const SHAPE: KvShape = KvShape { layers: 1, segments: 1, object_bytes: 4096, block_tokens: 1 };
/// Blocks of the pool: fewer than copies, so that they are written in parts.
const POOL: u32 = 512;

fn stack(devices: usize, capacity: Option<u64>) -> Stack {
    let plan = Plan::default();
    let capacity_bytes = capacity.map(|files| files * SHAPE.block_bytes());
    Stack::new(&Plan {
        devices,
        shape: SHAPE,
        blocks: POOL,
        format: Format { capacity_bytes, ..format(SHAPE) },
        options: StoreOptions { queues: 1, depth: 512, ..plan.options },
        ..plan
    })
}

/// Returns clusters of `sizes` with random members; each entry is in one or several of them.
fn clusters(seed: u64, entries: u32, sizes: &[usize]) -> Clusters {
    let mut random = StdRng::seed_from_u64(seed);
    let mut all = Clusters::default();
    for size in sizes {
        let mut members: Vec<Entry> = (0..entries).map(Entry).collect();
        members.shuffle(&mut random);
        members.truncate(*size);
        all.open(Cluster { medoid: members[0], members });
    }
    all
}

fn sizes(seed: u64, count: usize) -> Vec<usize> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(1..60)).collect()
}

fn key(entry: Entry) -> BlockKey {
    KeyChain::new(b"layer 7").next(&[entry.0])
}

fn save(stack: &mut Stack, clusters: &Clusters) -> Result<StoredClusters, StoreError> {
    let store = stack.store.clone();
    let copies = ClusterCopies::new(&store, clusters.clone(), key);
    let reservation = copies.reserve(&store)?;
    let own: Vec<u32> = (0..copies.keys.len() as u32)
        .filter(|position| reservation.has(*position as usize))
        .collect();
    for positions in own.chunks(POOL as usize) {
        let blocks = blocks(0, positions.len());
        for (position, block) in positions.iter().zip(&blocks) {
            // Copies of an entry have the same bytes.
            stack.kv.fill(*block, key(copies.entries[*position as usize]), 0);
        }
        let fill = store.fill(&reservation, positions, &blocks)?;
        let ticket = store.start(&fill, Layer(0), Order::Unordered)?;
        assert!(store.end(&[ticket.job])?.iter().all(|done| done.failure.is_none()));
    }
    store.commit_reservation(&reservation)?;
    store.sync_journal()?;
    copies.find(&store)
}

/// Counts of a retrieval.
struct Counts {
    /// Of the I/O kernel.
    commands: u64,
    doorbells: u64,
    /// Of the devices.
    devices: Vec<EmuCounters>,
}

/// Reads these entries into wiped blocks and checks every byte.
fn load(
    stack: &mut Stack,
    stored: &StoredClusters,
    reads: &[Vec<Read>],
) -> Result<Counts, StoreError> {
    let all: Vec<Read> = reads.iter().flatten().copied().collect();
    let mut blocks = blocks(0, stack.kv.pool.blocks() as usize);
    blocks.shuffle(&mut StdRng::seed_from_u64(all.len() as u64));
    blocks.truncate(all.len());
    blocks.iter().for_each(|block| stack.kv.wipe(*block));
    let before: Vec<EmuCounters> = stack.emus.iter().map(|emu| emu.counters()).collect();
    let stats = stack.store.stats()?;
    let load = stored.retrieve(&stack.store, reads, &blocks)?;
    let done = stack.store.wait(stack.store.start(&load, Layer(0), Order::Unordered)?)?;
    assert_eq!(done.device_bytes, all.len() as u64 * SHAPE.block_bytes());
    for (read, block) in all.iter().zip(&blocks) {
        assert!(stack.kv.holds(*block, Layer(0), key(read.entry), 0), "{read:?}");
    }
    let now = stack.store.stats()?;
    let devices = stack.emus.iter().zip(before).map(|(emu, before)| {
        let mut counted = emu.counters();
        counted.reads -= before.reads;
        counted.bytes_read -= before.bytes_read;
        counted.sq_doorbells -= before.sq_doorbells;
        counted
    });
    Ok(Counts {
        commands: now.plane.ring.total.commands - stats.plane.ring.total.commands,
        doorbells: now.plane.ring.total.sq_doorbells - stats.plane.ring.total.sq_doorbells,
        devices: devices.collect(),
    })
}

/// Returns the number of copies on each device.
fn copies(stored: &StoredClusters) -> Vec<u64> {
    let mut copies = vec![0; stored.placement().drives()];
    let places = stored.clusters().iter().flat_map(|(id, _)| stored.placement().of(id));
    places.for_each(|place| copies[place.drive.0] += 1);
    copies
}

fn wanted(stored: &StoredClusters, reads: &[Vec<Read>]) -> BTreeSet<Entry> {
    let found: Vec<Entry> = reads.iter().flatten().map(|read| read.entry).collect();
    let all: BTreeSet<Entry> = found.iter().copied().collect();
    assert_eq!(all.len(), found.len(), "an entry is read once");
    assert_eq!(reads.len(), stored.placement().drives());
    all
}

#[test]
fn entries_of_clusters_are_read_as_they_were_stored() {
    for devices in 1..=8 {
        let mut stack = stack(devices, None);
        let clusters = clusters(devices as u64, 400, &sizes(9, 40));
        let stored = save(&mut stack, &clusters).unwrap();
        let mut random = StdRng::seed_from_u64(devices as u64);
        for _ in 0..12 {
            let ids = random.random_range(1..6);
            let ids: Vec<ClusterId> =
                (0..ids).map(|_| ClusterId(random.random_range(0..40))).collect();
            let resident: BTreeSet<Entry> =
                (0..100).map(|_| Entry(random.random_range(0..400))).collect();
            let reads = stored.reads(&ids, |entry| resident.contains(&entry));
            let members = ids.iter().flat_map(|id| &stored.clusters().get(*id).members).copied();
            let missing: BTreeSet<Entry> = members.filter(|it| !resident.contains(it)).collect();
            assert_eq!(wanted(&stored, &reads), missing);
            let counts = load(&mut stack, &stored, &reads).unwrap();
            // Each device reads its batch, and nothing else.
            for (batch, counted) in reads.iter().zip(&counts.devices) {
                assert_eq!(counted.bytes_read, batch.len() as u64 * SHAPE.block_bytes());
            }
        }
    }
}

/// A cluster is contiguous on each device, and its reads are one batch a device: a doorbell for up
/// to 32 commands, and a command for up to 32 entries.
#[test]
fn a_cluster_is_one_command_and_one_doorbell_a_device() {
    for devices in 1..=8 {
        let mut stack = stack(devices, None);
        let clusters = clusters(1, 1000, &sizes(2, 60));
        let stored = save(&mut stack, &clusters).unwrap();
        for (id, cluster) in stored.clusters().iter() {
            let own: BTreeSet<Place> = stored.placement().of(id).iter().copied().collect();
            let reads: Vec<Read> = cluster
                .members
                .iter()
                .zip(stored.placement().of(id))
                .map(|(entry, place)| Read { place: *place, entry: *entry })
                .collect();
            assert_eq!(own.len(), reads.len());
            let counts = load(&mut stack, &stored, &[reads]).unwrap();
            let used = cluster.members.len().min(devices) as u64;
            let commands = cluster.members.len().div_ceil(devices).div_ceil(32) as u64;
            assert!(counts.commands >= used && counts.commands <= used * (commands + 1));
            assert_eq!(counts.doorbells, used, "{devices} devices, {cluster:?}");
            for counted in &counts.devices {
                assert_eq!(counted.sq_doorbells, u64::from(counted.reads > 0));
            }
        }
        // The reads that a step wants: several clusters, replicas, and still one batch a device.
        let ids: Vec<ClusterId> = (0..20).map(|at| ClusterId(at * 3)).collect();
        let reads = stored.reads(&ids, |_| false);
        let entries = wanted(&stored, &reads).len() as u64;
        let counts = load(&mut stack, &stored, &reads).unwrap();
        let least: u64 = counts.devices.iter().map(|it| it.reads.div_ceil(32)).sum();
        assert_eq!(counts.doorbells, least, "{devices} devices");
        assert!(counts.commands < entries, "{} commands", counts.commands);
    }
}

/// Bytes of the busiest device by the mean of all, of what is stored and of what is read.
#[test]
fn devices_have_and_read_the_same_number_of_entries() {
    let balance = |bytes: &[u64]| {
        let mean = bytes.iter().sum::<u64>() as f64 / bytes.len() as f64;
        *bytes.iter().max().unwrap() as f64 / mean
    };
    for (devices, seed) in (1..=8).flat_map(|devices| [(devices, 3), (devices, 30), (devices, 31)])
    {
        let mut stack = stack(devices, None);
        let clusters = clusters(seed, 600, &sizes(seed + 1, 60));
        let before: Vec<u64> = stack.emus.iter().map(|it| it.counters().bytes_written).collect();
        let stored = save(&mut stack, &clusters).unwrap();
        let now = stack.emus.iter().map(|it| it.counters().bytes_written);
        let copies = copies(&stored);
        // The journal and the superblocks are written, too.
        let written = now.zip(before).map(|(now, before)| now - before);
        for (written, copies) in written.zip(&copies) {
            assert!(written >= copies * SHAPE.block_bytes());
        }
        assert!(balance(&copies) <= 1.05, "{copies:?}");
        let ids: Vec<ClusterId> = (0..60).step_by(3).map(ClusterId).collect();
        let reads = stored.reads(&ids, |_| false);
        let counts = load(&mut stack, &stored, &reads).unwrap();
        let bytes: Vec<u64> = counts.devices.iter().map(|it| it.bytes_read).collect();
        assert!(balance(&bytes) <= 1.05, "{bytes:?}");
    }
}

/// Holes between other files: copies are wherever there is room, and are still found.
#[test]
fn clusters_are_read_from_a_fragmented_store() {
    for devices in 1..=8 {
        let mut stack = stack(devices, Some(2048));
        let mut random = StdRng::seed_from_u64(5);
        let others = stack::keys(0..2048);
        for part in others.chunks(POOL as usize) {
            assert_eq!(stack.put(part, 0), part.len());
        }
        // Runs of 1 to 63 files are free, about half of all.
        let mut at = 0;
        while at < others.len() {
            let run = random.random_range(1..64_usize).min(others.len() - at);
            stack.store.remove(&others[at..at + run]).unwrap();
            at += run + random.random_range(1..64_usize);
        }
        stack.store.sync_journal().unwrap();
        let runs = u64::from(stack.store.stats().unwrap().files.free_runs);
        assert!(runs > 20, "{runs}");
        let clusters = clusters(6, 200, &sizes(7, 20));
        let stored = save(&mut stack, &clusters).unwrap();
        let copies = copies(&stored);
        // Each run begins on some device.
        let spread = copies.iter().max().unwrap() - copies.iter().min().unwrap();
        assert!(spread <= runs, "{copies:?}");
        let ids: Vec<ClusterId> = (0..20).map(ClusterId).collect();
        for ids in [&ids[..], &ids[3..8]] {
            let reads = stored.reads(ids, |_| false);
            wanted(&stored, &reads);
            load(&mut stack, &stored, &reads).unwrap();
        }
    }
}

#[test]
fn a_damaged_copy_is_an_error_and_others_are_read() {
    let mut stack = stack(4, None);
    let clusters = clusters(8, 300, &sizes(8, 12));
    let stored = save(&mut stack, &clusters).unwrap();
    let of = |id: u32| stored.reads(&[ClusterId(id)], |_| false);
    let reads = of(5);
    let damaged = *reads.iter().flatten().next().unwrap();
    let lbas = Some(LbaRange { first: stack.data_lba() + damaged.place.slot, count: 1 });
    let when = FaultWhen { opcode: Some(READ), lbas, admin: Some(false), ..FaultWhen::default() };
    stack.emus[damaged.place.drive.0].set_faults(nvme_emu::FaultPlan {
        rules: vec![FaultRule::new(when, FaultAction::CorruptRead)],
        ..Default::default()
    });
    let error = load(&mut stack, &stored, &reads).err().unwrap();
    let StoreError::Transfer { failure } = error else { panic!("{error}") };
    assert_eq!(failure.status, gio_uring::IoStatus::Checksum);
    stack.faults(None);
    // It is lost for good, and not read again.
    let again = load(&mut stack, &stored, &reads).err().unwrap();
    assert!(matches!(again, StoreError::Stale { .. }), "{again}");
    let other =
        (0..12).map(of).find(|it| !it.iter().flatten().any(|read| read.place == damaged.place));
    load(&mut stack, &stored, &other.unwrap()).unwrap();
    let copies = ClusterCopies::new(&stack.store, clusters.clone(), key);
    let error = copies.find(&stack.store).unwrap_err();
    assert!(error.to_string().contains("copies of clusters; give one for each"), "{error}");
}

#[test]
fn a_full_store_takes_no_part_of_the_clusters_and_removed_ones_give_their_room_back() {
    let mut stack = stack(4, Some(512));
    let large = clusters(9, 400, &[300, 200, 100]);
    let free = stack.store.stats().unwrap().files_free();
    let error = save(&mut stack, &large).unwrap_err();
    let StoreError::NoRoom { asked: 600, found } = error else { panic!("{error}") };
    assert!(found < 600, "{found}");
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_free(), stats.files.stored, stats.files.writing), (free, 0, 0));

    for seed in 10..13 {
        let clusters = clusters(seed, 400, &[300, 60, 100]);
        let stored = save(&mut stack, &clusters).unwrap();
        assert_eq!(stack.store.stats().unwrap().files_free(), free - 460);
        // Used clusters are not evicted.
        assert!(matches!(save(&mut stack, &large), Err(StoreError::NoRoom { .. })));
        let reads = stored.reads(&[ClusterId(0), ClusterId(2)], |_| false);
        load(&mut stack, &stored, &reads).unwrap();
        drop(stored);
        let copies = ClusterCopies::new(&stack.store, clusters.clone(), key);
        stack.store.remove(&copies.keys).unwrap();
        stack.store.sync_journal().unwrap();
        assert_eq!(stack.store.stats().unwrap().files_free(), free);
    }
}

/// A reservation that was dropped after some of it was written leaves nothing behind.
#[test]
fn half_written_clusters_leave_nothing() {
    let stack = stack(2, None);
    let free = stack.store.stats().unwrap().files_free();
    let clusters = clusters(13, 400, &[300, 200]);
    let copies = ClusterCopies::new(&stack.store, clusters.clone(), key);
    let reservation = copies.reserve(&stack.store).unwrap();
    let fill = stack.store.fill(&reservation, &[0, 1, 2], &blocks(0, 3)).unwrap();
    let ticket = stack.store.start(&fill, Layer(0), Order::Unordered).unwrap();
    stack.store.end(&[ticket.job]).unwrap();
    assert!(stack.store.commit_reservation(&reservation).is_err());
    drop((fill, reservation));
    assert_eq!(stack.store.stats().unwrap().files_free(), free);
    let error = copies.find(&stack.store).unwrap_err();
    assert!(error.to_string().starts_with("0 blocks were given for"), "{error}");
}

proptest! {
    /// A run of files is a placement of Swarm: its drives and slots follow from the number of the
    /// file, and those of another row from the row's number.
    #[test]
    fn files_in_the_order_of_places_are_in_these_places(
        devices in 1..=8_u32, width in 1..=64_u32, layers in 1..5_u32, segments in 1..3_u32,
        first in 0..200_u32, seed: u64,
    ) {
        let shape = KvShape { layers, segments, ..SHAPE };
        let geometry = Geometry::new(&shape, devices, devices * width, 4096).unwrap();
        let clusters = clusters(seed, 60, &sizes(seed, 8));
        let placement = Placement::new(&clusters, devices as usize);
        for row in (0..shape.rows()).map(Row) {
            let copies = placement.in_order();
            for (at, (id, position)) in (0..).zip(copies) {
                let chosen = placement.of(id)[position];
                let found = geometry.object(FileId(first + at), row);
                // A run that begins elsewhere is turned: all copies by as many drives.
                let turn = (first + row.0) as usize % devices as usize;
                let DeviceIndex(device) = found.device;
                prop_assert_eq!(device as usize, (chosen.drive.0 + turn) % devices as usize);
                if (shape.rows(), first) == (1, 0) {
                    prop_assert_eq!(found.slot.0, chosen.slot);
                }
                // The next copy on this device is its neighbour, except at the end of a group.
                let next = geometry.object(FileId(first + at + devices), row);
                let is_last = (first + at) % geometry.group / devices == width - 1;
                prop_assert_eq!(next.device, found.device);
                let rest = u64::from((shape.rows() - 1) * width);
                let gap = if is_last { rest + 1 } else { 1 };
                prop_assert_eq!(next.slot.0 - found.slot.0, gap);
            }
        }
    }
}

/// Copies that are stored already, by another set of clusters, are not stored again.
#[test]
fn stored_copies_are_shared() {
    let mut stack = stack(3, None);
    let one = save(&mut stack, &clusters(20, 100, &[60, 40])).unwrap();
    let free = stack.store.stats().unwrap().files_free();
    let other = save(&mut stack, &clusters(20, 100, &[60, 40])).unwrap();
    assert_eq!(stack.store.stats().unwrap().files_free(), free);
    drop(one);
    let reads = other.reads(&[ClusterId(0), ClusterId(1)], |_| false);
    load(&mut stack, &other, &reads).unwrap();
}

/// After the power was cut, copies are found and read; those of a reservation that was not
/// committed are not, and their files are free.
#[test]
fn clusters_survive_a_crash() {
    let options = StoreOptions::default();
    let (shelf, mut stack) = Shelf::made(3, SHAPE, &options);
    let kept = clusters(40, 60, &[30, 10, 20]);
    drop(save(&mut stack, &kept).unwrap());
    let free = stack.store.stats().unwrap().files_free();
    let other = clusters(41, 60, &[40]);
    let other_key = |entry: Entry| KeyChain::new(b"layer 8").next(&[entry.0]);
    let copies = ClusterCopies::new(&stack.store, other.clone(), other_key);
    let reservation = copies.reserve(&stack.store).unwrap();
    let positions: Vec<u32> = (0..40).collect();
    let fill = stack.store.fill(&reservation, &positions, &blocks(0, 40)).unwrap();
    let ticket = stack.store.start(&fill, Layer(0), Order::Unordered).unwrap();
    stack.store.end(&[ticket.job]).unwrap();
    crash(stack);

    let mut stack = shelf.open(&options);
    assert_eq!(stack.store.stats().unwrap().files_free(), free);
    let lost = ClusterCopies::new(&stack.store, other, other_key).find(&stack.store).unwrap_err();
    assert!(lost.to_string().starts_with("0 blocks were given for"), "{lost}");
    let stored = ClusterCopies::new(&stack.store, kept, key).find(&stack.store).unwrap();
    for (id, _) in stored.clusters().clone().iter() {
        let reads = stored.reads(&[id], |_| false);
        load(&mut stack, &stored, &reads).unwrap();
    }
}
