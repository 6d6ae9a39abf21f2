//! Faults of the simulated medium: each one in the log happens, and no others.

use super::*;

const BLOCK: usize = 4096;
const BLOCKS: usize = CAPACITY as usize / BLOCK;

/// Creates a medium of `BLOCKS` blocks, block n filled with n + 1.
fn filled(options: SimOptions) -> (MemoryMedia, Rig, SimFaultLog) {
    let bytes = MemoryMedia::new(CAPACITY).unwrap();
    (0..BLOCKS).for_each(|block| bytes.poke((block * BLOCK) as u64, &old(block)).unwrap());
    let sim = SimMedia::new(bytes.clone(), options);
    let log = sim.fault_log();
    (bytes, Rig::new(sim), log)
}

fn old(block: usize) -> Vec<u8> {
    vec![u8::try_from(block + 1).unwrap(); BLOCK]
}

fn new(block: usize) -> Vec<u8> {
    vec![u8::try_from(block + 129).unwrap(); BLOCK]
}

fn options(seed: u64, faults: SimFaults) -> SimOptions {
    SimOptions { seed, faults, ..SimOptions::default() }
}

fn stored(bytes: &MemoryMedia, block: usize) -> Vec<u8> {
    let mut found = vec![0; BLOCK];
    bytes.peek((block * BLOCK) as u64, &mut found).unwrap();
    found
}

/// Overwrites each block once, in order. Returns the medium and the log.
fn overwrite(seed: u64, faults: SimFaults, fua: bool) -> (MemoryMedia, Vec<SimFault>) {
    let (bytes, mut rig, log) = filled(options(seed, faults));
    for block in 0..BLOCKS {
        rig.write((block * BLOCK) as u64, &new(block), fua).unwrap();
    }
    (bytes, log.take())
}

#[test]
fn lost_writes_leave_what_was_there() {
    let faults = SimFaults { lost_write_ppm: 250_000, ..SimFaults::default() };
    for fua in [false, true] {
        let (bytes, log) = overwrite(3, faults, fua);
        let lost = |block: usize| {
            let (offset, len) = ((block * BLOCK) as u64, BLOCK as u64);
            log.contains(&SimFault { kind: SimFaultKind::LostWrite, offset, len })
        };
        for block in 0..BLOCKS {
            let expected = if lost(block) { old(block) } else { new(block) };
            assert!(stored(&bytes, block) == expected, "block {block}");
        }
        assert!((4..32).contains(&log.len()), "{} of {BLOCKS}", log.len());
        assert_eq!(overwrite(3, faults, fua).1, log, "the same seed");
        assert_ne!(overwrite(4, faults, fua).1, log);
    }
}

#[test]
fn misdirected_writes_land_elsewhere() {
    let faults = SimFaults { misdirected_write_ppm: 100_000, ..SimFaults::default() };
    let mut seen = 0;
    for seed in 0..8 {
        let (bytes, log) = overwrite(seed, faults, true);
        // In the order of the writes, on a vector of blocks.
        let mut model: Vec<_> = (0..BLOCKS).map(old).collect();
        for (block, own) in (0..BLOCKS).map(|block| (block, (block * BLOCK) as u64)) {
            let to = match log.iter().find(|fault| fault.offset == own).map(|fault| fault.kind) {
                Some(SimFaultKind::MisdirectedWrite { to }) => usize::try_from(to).unwrap(),
                other => {
                    assert_eq!(other, None);
                    block * BLOCK
                }
            };
            assert!(to.is_multiple_of(BLOCK), "{to}");
            model[to / BLOCK] = new(block);
        }
        assert!(
            log.iter()
                .all(|fault| fault.kind != SimFaultKind::MisdirectedWrite { to: fault.offset })
        );
        for (block, content) in model.iter().enumerate() {
            assert!(stored(&bytes, block) == *content, "seed {seed}, block {block}");
        }
        seen += log.len();
    }
    assert!((20..90).contains(&seen), "{seen} of {}", 8 * BLOCKS);
}

#[test]
fn a_write_with_nowhere_else_to_go_is_not_misdirected() {
    let faults = SimFaults { misdirected_write_ppm: 1_000_000, ..SimFaults::default() };
    let write_half = |capacity: u64| {
        let bytes = MemoryMedia::new(capacity).unwrap();
        let mut rig = Rig::new(SimMedia::new(bytes.clone(), options(1, faults)));
        rig.write(0, &[0xEE; ARENA], true).unwrap();
        [0, ARENA].map(|at| stored(&bytes, at / BLOCK)[0])
    };
    assert_eq!(write_half(2 * ARENA as u64), [0, 0xEE], "one place that is not its own");
    assert_eq!(write_half((2 * ARENA - BLOCK) as u64), [0xEE, 0]);
}

#[test]
fn rot_stays_where_it_is() {
    let faults = SimFaults { rot_ppm: 200_000, ..SimFaults::default() };
    let (bytes, mut rig, log) = filled(options(5, faults));
    let mut rotten = 0;
    for block in 0..BLOCKS {
        let read = rig.read((block * BLOCK) as u64, BLOCK).unwrap();
        let bits: u32 = read.iter().zip(old(block)).map(|(a, b)| (a ^ b).count_ones()).sum();
        let logged = log.take();
        assert_eq!(logged.len(), usize::from(bits > 0), "block {block}");
        assert!(bits <= 8, "{bits} bits");
        assert!(read == stored(&bytes, block), "what was read is what is stored");
        rotten += logged.len();
    }
    assert!((4..30).contains(&rotten), "{rotten} of {BLOCKS}");
    for seed in 0..100 {
        let medium = MemoryMedia::new(4096).unwrap();
        medium.rot(100, 3, seed).unwrap();
        let mut found = [0; 4096];
        medium.peek(0, &mut found).unwrap();
        let bits = |range: std::ops::Range<usize>| -> u32 {
            found[range].iter().map(|byte| byte.count_ones()).sum()
        };
        assert!((1..=3).contains(&bits(100..103)), "seed {seed}: a bit in each byte at most");
        assert_eq!(bits(0..4096), bits(100..103));
    }
    assert!(bytes.rot(CAPACITY - 1, 2, 0).is_err());
}

/// Returns the contents of a block after a power loss: its parts of 512 bytes.
fn parts(bytes: &MemoryMedia, block: usize) -> Vec<u8> {
    let found = stored(bytes, block);
    let part = |part: &[u8]| {
        assert!(part.iter().all(|byte| *byte == part[0]), "a part is torn inside");
        part[0]
    };
    found.chunks(512).map(part).collect()
}

#[test]
fn power_loss_tears_blocks_when_asked_to() {
    for tear_bytes in [None, Some(512)] {
        let faults = SimFaults { tear_bytes, ..SimFaults::default() };
        let (mut torn, mut whole, mut logged) = (0, [0; 2], 0);
        for seed in 0..40 {
            let (bytes, mut rig, log) = filled(options(seed, faults));
            rig.write(0, &new(0), true).unwrap();
            rig.write(BLOCK as u64, &new(1), false).unwrap();
            rig.domain.access().write(rig.iova(0), &new(2)).unwrap();
            let sg_list = rig.sg_list(&[(Some(0), BLOCK)]);
            let write = MediaKind::Write { fua: true };
            let op = rig.op(write, 2 * BLOCK as u64, BLOCK as u64, sg_list);
            assert!(rig.media.submit(op, rig.now).is_none());
            rig.media.power_loss();
            assert!(stored(&bytes, 0) == new(0), "what is permanent is whole");
            // One that was in a cache, one in flight.
            for block in [1, 2] {
                let (before, after) = (old(block)[0], new(block)[0]);
                let parts = parts(&bytes, block);
                let written = parts.iter().filter(|part| **part == after).count();
                assert!(parts.iter().all(|part| [before, after].contains(part)));
                match written {
                    0 => whole[0] += 1,
                    8 => whole[1] += 1,
                    _ => torn += 1,
                }
            }
            logged += log.take().len();
        }
        assert_eq!(torn, logged);
        assert!(whole.iter().all(|count| (8..60).contains(count)), "{whole:?}");
        assert_eq!((10..40).contains(&torn), tear_bytes.is_some(), "{torn} torn");
    }
}

#[test]
fn a_deallocation_in_flight_may_have_happened_in_part() {
    let (mut zeroed, mut kept) = (0, 0);
    for seed in 0..8 {
        let (bytes, mut rig, _) = filled(options(seed, SimFaults::default()));
        let op = rig.op(MediaKind::Deallocate, 0, CAPACITY, SgList::new());
        assert!(rig.media.submit(op, rig.now).is_none());
        rig.media.power_loss();
        for block in 0..BLOCKS {
            match stored(&bytes, block) {
                found if found == old(block) => kept += 1,
                found if found == [0; BLOCK] => zeroed += 1,
                found => panic!("seed {seed}, block {block}: {:?}", &found[..8]),
            }
        }
    }
    assert!(zeroed > 100 && kept > 100, "{zeroed} zeroed, {kept} kept");
}

/// A failed flush is not repaired by the next one, only by a new write.
#[test]
fn a_failed_flush_leaves_what_a_later_one_does_not_save() {
    let faults = SimFaults { failed_flush_ppm: 500_000, ..SimFaults::default() };
    let (mut failed, mut lost) = (0, 0);
    for seed in 0..60 {
        let (bytes, mut rig, log) = filled(options(seed, faults));
        for block in [0, 1] {
            rig.write((block * BLOCK) as u64, &new(block), false).unwrap();
        }
        let Err(error) = rig.simple(MediaKind::Flush, 0, 0) else { continue };
        assert_eq!(error, MediaError::Failed { action: "a flush" });
        assert!(rig.read(0, BLOCK).unwrap() == new(0), "it can be read all the same");
        rig.write(BLOCK as u64, &new(2), false).unwrap();
        if rig.simple(MediaKind::Flush, 0, 0).is_err() {
            continue;
        }
        failed += 1;
        rig.media.power_loss();
        assert!(log.take().iter().any(|fault| fault.kind == SimFaultKind::FailedFlush));
        assert!(stored(&bytes, 1) == new(2), "seed {seed}: it was written anew, and flushed");
        lost += u32::from(stored(&bytes, 0) == old(0));
    }
    assert!(failed > 8 && (2..failed - 2).contains(&lost), "{lost} of {failed} lost");
}

#[test]
fn reads_and_writes_fail_when_asked_to() {
    let faults =
        SimFaults { failed_read_ppm: 300_000, failed_write_ppm: 300_000, ..SimFaults::default() };
    let (bytes, mut rig, log) = filled(options(7, faults));
    let (mut reads, mut writes, mut written) = (0, 0, 0);
    for block in 0..BLOCKS {
        let failed = rig.write((block * BLOCK) as u64, &new(block), true).is_err();
        let found = stored(&bytes, block);
        assert!(found == new(block) || failed && found == old(block), "block {block}");
        writes += usize::from(failed);
        written += usize::from(failed && found == new(block));
        match rig.read((block * BLOCK) as u64, BLOCK) {
            Ok(read) => assert!(read == found, "block {block}"),
            Err(_) => reads += 1,
        }
    }
    let logged = log.take();
    let count = |kind| logged.iter().filter(|fault| fault.kind == kind).count();
    assert_eq!(count(SimFaultKind::FailedRead), reads);
    assert_eq!(count(SimFaultKind::FailedWrite), writes);
    assert!(reads > 5 && writes > 5 && (1..writes).contains(&written));
}

/// As after a reset of the controller: data in flight may be readable and later lost, with or
/// without FUA.
#[test]
fn a_cancelled_write_may_be_in_the_cache() {
    let mut found = [0; 3];
    for seed in 0..40 {
        let (bytes, mut rig, _) = filled(options(seed, SimFaults::default()));
        rig.domain.access().write(rig.iova(0), &new(0)).unwrap();
        let sg_list = rig.sg_list(&[(Some(0), BLOCK)]);
        let op = rig.op(MediaKind::Write { fua: true }, 0, BLOCK as u64, sg_list);
        assert!(rig.media.submit(op, rig.now).is_none());
        rig.media.cancel();
        let readable = stored(&bytes, 0) == new(0);
        rig.media.power_loss();
        let at = usize::from(readable) + usize::from(stored(&bytes, 0) == new(0));
        found[at] += 1;
    }
    assert!(found.iter().all(|count| *count > 3), "not there, lost, and kept: {found:?}");
}
