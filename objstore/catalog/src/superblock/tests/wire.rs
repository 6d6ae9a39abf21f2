//! Wire format of a superblock.

use proptest::{prelude::*, sample::Index};

use super::*;

fn superblocks() -> impl Strategy<Value = Superblock> {
    let numbers = (any::<[u8; 16]>(), 1u32..5, 0u64..1 << 40, any::<bool>());
    (1u8..9, 0u32..4, any::<Index>(), numbers, any::<[bool; 3]>(), any::<u64>()).prop_map(
        |(count, shift, own, (store, ranks, first, ready), [catalog, data, checksums], number)| {
            let lba_bytes = 512 << shift;
            let mut devices: Vec<_> = (0..count)
                .map(|number| device(number, lba_bytes, (64 << 20) >> (9 + shift)))
                .collect();
            for (identity, region) in &mut devices {
                region.first = Lba(first);
                identity.nguid = store;
            }
            let plan = Plan {
                store: StoreId(store),
                rank: number as u32 % ranks,
                ranks,
                catalog,
                data: data || !catalog,
                checksums,
                codec: if number % 3 == 0 && shift < 2 { Codec::Exp3 } else { Codec::None },
                files_max: Some(1 + number as u32 % 500),
                ..plan(&devices)
            };
            let mut superblock = plan.superblocks().unwrap().swap_remove(own.index(count.into()));
            superblock.sequence = number / 2 - (number / 2) / 2;
            superblock.state = if ready { State::Ready } else { State::Formatting };
            if let Some(journal) = &mut superblock.journal {
                (journal.active, journal.generation) = (Half::B, number);
                journal.certain_bytes = number / 3;
            }
            superblock
        },
    )
}

/// Sets the correct CRC.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(superblock in superblocks()) {
        let bytes = superblock.encode();
        prop_assert_eq!(bytes.len(), SUPERBLOCK_BYTES);
        prop_assert_eq!(&sealed(bytes.clone()), &bytes, "the CRC is where other versions look");
        prop_assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    }

    #[test]
    fn changed_bytes_are_refused(
        superblock in superblocks(),
        changes in prop::collection::vec((any::<Index>(), 1u8..), 1..5),
    ) {
        let before = superblock.encode();
        let mut bytes = before.clone();
        for (at, change) in changes {
            bytes[at.index(SUPERBLOCK_BYTES)] ^= change;
        }
        prop_assume!(bytes != before);
        let fault = Superblock::decode(&bytes).unwrap_err();
        prop_assert!(matches!(fault, CopyFault::None | CopyFault::Checksum), "{}", fault);
    }

    /// Random fields under a correct CRC: nothing panics, and an accepted superblock is usable.
    #[test]
    fn impossible_fields_do_no_harm(
        superblock in superblocks(),
        changes in prop::collection::vec((16usize..520, any::<u8>()), 1..4), whole in any::<bool>(),
    ) {
        let mut bytes = superblock.encode();
        for (at, value) in changes {
            // Also whole words of ones, which make arithmetic overflow.
            let range = if whole { at / 8 * 8..at / 8 * 8 + 8 } else { at..at + 1 };
            bytes[range].fill(if whole { 0u8.wrapping_sub(value & 1) } else { value });
        }
        let Ok(decoded) = Superblock::decode(&sealed(bytes)) else { return Ok(()) };
        prop_assert_eq!(decoded.data.is_some(), decoded.geometry().is_some());
        prop_assert_eq!(decoded.data.is_some(), decoded.data_region().is_some());
        let end = decoded.region.bytes();
        if let Some(journal) = decoded.journal {
            prop_assert!(journal.half_offset(Half::B) + journal.half_bytes <= end);
            // So the memory of its catalog follows from the size of the device.
            let record = crate::record::commit_bytes(decoded.layout.words_per_file as usize) as u64;
            prop_assert!(u64::from(decoded.layout.files) * record <= journal.half_bytes);
        }
        prop_assert_eq!(Superblock::decode(&decoded.encode()), Ok(decoded));
    }
}

#[test]
fn other_versions_and_their_features_are_refused_by_name() {
    let bytes = formatted(1).1[0].encode();
    let change = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        Superblock::decode(&sealed(bytes)).unwrap_err()
    };
    // The one with permanent pins, and the next one.
    for version in [2, 4] {
        assert_eq!(change(8, version), CopyFault::Version { version: version.into() });
    }
    assert_eq!(change(24, 4), CopyFault::Features { bits: 4 });
    assert_eq!(change(24, 5), CopyFault::Features { bits: 4 }, "without those that are known");
    assert_eq!(change(24, 1), CopyFault::Impossible { field: "data area" }, "its slots are raw");
    // Objects of 4,160 bytes, which have no encoding.
    let mut odd = bytes.clone();
    (odd[24], odd[108]) = (1, 64);
    let fault = Superblock::decode(&sealed(odd)).unwrap_err();
    assert_eq!(fault, CopyFault::Impossible { field: "codec" });
    assert_eq!(change(56, 9), CopyFault::Impossible { field: "set of roles" });
    assert_eq!(change(60, 9), CopyFault::Impossible { field: "state" });
    // Features that may be ignored.
    let mut compatible = bytes.clone();
    compatible[16] = 0xff;
    assert!(Superblock::decode(&sealed(compatible)).is_ok());
}

/// The byte map of docs/reference/on-disk-format.md, by hand.
#[test]
fn bytes_are_where_the_document_says() {
    let mut superblock = formatted(2).1.swap_remove(0);
    superblock.sequence = 0x0102_0304_0506_0708;
    let bytes = superblock.encode();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!((&bytes[..8], u32_at(8)), (b"RIPIENO\n".as_slice(), 3));
    assert_eq!((u64_at(16), u64_at(24), u64_at(32)), (0, 0, 0x0102_0304_0506_0708));
    assert_eq!(bytes[40..56], [7; 16]);
    assert_eq!([56, 60, 64, 68, 72, 76].map(u32_at), [3, 2, 0, 1, 0, 2]);
    assert_eq!((u64_at(80), u64_at(88), u32_at(96)), (0, 8 << 11, 9));
    assert_eq!([100, 104, 108, 112].map(u32_at), [2, 2, 4096, 16]);
    let (layout, data) = (superblock.layout, superblock.data.unwrap());
    assert_eq!([116, 120, 124].map(u32_at), [layout.files, 4, 16]);
    assert_eq!((u64_at(128), u64_at(136)), (data.offset, data.bytes));
    assert_eq!([144, 148].map(u32_at), [data.group, 4096]);
    let journal = superblock.journal.unwrap();
    assert_eq!([152, 160, 168].map(u64_at), [1 << 20, journal.half_bytes, 1]);
    assert_eq!(([176, 180].map(u32_at), u64_at(184)), ([journal.group_bytes_max, 0], 512));
    assert_eq!(bytes[192..256], [0; 64]);
    superblock.layout.codec = Codec::Exp3;
    assert_eq!(superblock.encode()[24..32], [1, 0, 0, 0, 0, 0, 0, 0]);
    let second = &bytes[256 + 104..];
    assert_eq!((&second[..5], &second[40..42]), (b"model".as_slice(), b"S1".as_slice()));
    assert_eq!(
        (second[60], &second[88..90], &second[96..99]),
        (1, [0, 2].as_slice(), [0, 64, 0].as_slice())
    );
}
