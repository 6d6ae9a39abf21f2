//! Damaged or different copies, and interrupted formatting.

use super::*;
use crate::journal::Journal;

const COPY_1: u64 = 512 << 10;

#[test]
fn the_newer_copy_counts_and_a_damaged_one_does_not() {
    let (media, superblocks) = formatted(1);
    let (medium, old) = (&media[0], &superblocks[0]);
    let mut new = old.clone();
    new.sequence += 1;
    for newer_at in [0, COPY_1] {
        old.write(&mut medium.clone()).unwrap();
        medium.corrupt(newer_at, |bytes| bytes[..SUPERBLOCK_BYTES].copy_from_slice(&new.encode()));
        assert_eq!(read(medium), Ok(OnDevice::Ours(Box::new(new.clone()))));
        medium.corrupt(newer_at + 40, |bytes| bytes[0] ^= 1);
        assert_eq!(read(medium), Ok(OnDevice::Ours(Box::new(old.clone()))));
        medium.corrupt(newer_at, |bytes| bytes[..SUPERBLOCK_BYTES].fill(0));
        assert_eq!(read(medium), Ok(OnDevice::Ours(Box::new(old.clone()))));
    }
    let [a, b] = Superblock::read_copies(&mut medium.clone()).unwrap();
    assert_eq!((a.as_ref(), b), (Ok(old), Err(CopyFault::None)));
    // If the other one is damaged, too, there is no store, but the device is not blank either.
    medium.corrupt(40, |bytes| bytes[0] ^= 1);
    let error = read(medium).unwrap_err();
    assert_eq!(error.to_string(), "sim0: the superblock cannot be used: its CRC is wrong");
}

#[test]
fn copies_of_two_stores_are_no_store() {
    let (media, superblocks) = formatted(1);
    let other = Superblock { store: StoreId([8; 16]), ..superblocks[0].clone() };
    media[0].corrupt(COPY_1, |bytes| bytes[..SUPERBLOCK_BYTES].copy_from_slice(&other.encode()));
    let error = read(&media[0]).unwrap_err();
    assert!(matches!(error, FormatError::TwoStores { .. }), "{error}");
}

/// The copy that this version cannot read may be the valid one.
#[test]
fn a_copy_of_a_newer_version_is_not_passed_over() {
    let (media, superblocks) = formatted(1);
    let mut bytes = superblocks[0].encode();
    bytes[8] = 4;
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    media[0].corrupt(COPY_1, |to| to[..SUPERBLOCK_BYTES].copy_from_slice(&bytes));
    let error = read(&media[0]).unwrap_err().to_string();
    assert!(error.starts_with("sim0: the superblock cannot be used: it has version 4"), "{error}");
}

#[test]
fn a_region_without_room_for_superblocks_is_refused() {
    let error = read(&Medium::new("tiny", 512 << 10, 512)).unwrap_err().to_string();
    assert!(error.starts_with("tiny: its region has 524288 bytes"), "{error}");
}

/// One device under two names: what was written for the first is gone.
#[test]
fn a_device_that_is_given_twice_is_found_at_the_end_of_formatting() {
    let medium = Medium::new("twice", 64 << 20, 512);
    let devices = [device(0, 512, (64 << 20) >> 9), device(1, 512, (64 << 20) >> 9)];
    let mut superblocks = plan(&devices).superblocks().unwrap();
    let error = write(&[medium.clone(), medium], &mut superblocks).unwrap_err().to_string();
    assert!(error.starts_with("twice: another superblock is on it"), "{error}");
}

/// Power fails at each write while a store is formatted over another one: afterwards there is the
/// whole old store, no store, or the whole new one.
#[test]
fn interrupted_formatting_leaves_no_half_of_a_store() {
    for second_loses_power in [true, false] {
        let mut ends = [0; 3];
        for at in 0.. {
            if interrupted(at, second_loses_power, &mut ends) {
                break;
            }
        }
        assert!(ends[1] > 3 && ends[2] > 0, "old, none, new: {ends:?}");
    }
}

/// Formats two devices, of which the first loses power at this write. Counts the outcomes (old
/// store, none, new store), and returns true if formatting succeeded.
fn interrupted(at: u64, second_loses_power: bool, ends: &mut [u32; 3]) -> bool {
    let (media, old) = formatted(2);
    let mut new = old.clone();
    for superblock in &mut new {
        superblock.store = StoreId([9; 16]);
    }
    media[0].plan(Faults { power_loss: Some(at), ..Faults::default() });
    // Its cache loses unflushed writes, or it has a power supply of its own.
    let power_loss = second_loses_power.then_some(at / 2);
    media[1].plan(Faults { power_loss, ..Faults::default() });
    let done = write(&media, &mut new).is_ok();
    let mut numbers = (0..).map(|n: u32| n.wrapping_mul(at as u32 + 7) / 3);
    media.iter().for_each(|m| m.restart(&mut |bound| numbers.next().unwrap() % bound));
    let found: Vec<_> = media.iter().map(read).collect();
    let members = media.iter().zip(&found).enumerate().map(|(number, (medium, found))| {
        let (identity, region) = device(number as u8, 512, 8 << 11);
        let found = found.clone().unwrap_or(OnDevice::Blank);
        Member { name: medium.name().to_owned(), identity, region, found }
    });
    let members: Vec<Member> = members.collect();
    match check_set(&members, &Expected::default()) {
        Ok(set) if set[0].store == old[0].store => ends[0] += 1,
        Ok(set) => {
            let nothing = |_: crate::Record<'_>| Err::<(), _>("a record of another store");
            let io = Box::new(media[0].clone());
            Journal::open(io, set[0].clone(), nothing, |_, _| {}).unwrap();
            ends[2] += 1;
        }
        Err(error) => {
            assert!(!done, "{error}");
            ends[1] += 1;
        }
    }
    done
}
