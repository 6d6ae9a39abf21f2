use proptest::{prelude::*, sample::Index};

use super::*;

const SERIES: Series = Series { store: StoreId([3; 16]), generation: 9, lba_bytes: 512 };

fn group(position: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![1; 7];
    SERIES.encode(position, payload, &mut bytes);
    bytes
}

proptest! {
    #[test]
    fn what_was_encoded_is_found(
        position in any::<u64>(), payload in prop::collection::vec(any::<u8>(), 0..3000),
        behind in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut bytes = group(position, &payload);
        let length = bytes.len() as u64;
        prop_assert!(length.is_multiple_of(512) && length < 48 + 512 + payload.len() as u64);
        bytes.extend(behind);
        let found = Group { position, payload: &payload, bytes: length };
        prop_assert_eq!(SERIES.group_in(&bytes), Some(found));
    }

    #[test]
    fn changed_and_short_groups_do_not_count(
        payload in prop::collection::vec(any::<u8>(), 0..3000),
        changes in prop::collection::vec((any::<Index>(), 1u8..), 1..5), cut in any::<Index>(),
    ) {
        let used = 48 + payload.len();
        let before = group(1024, &payload);
        let mut bytes = before.clone();
        for (at, change) in changes {
            bytes[at.index(used)] ^= change;
        }
        prop_assume!(bytes != before);
        prop_assert_eq!(SERIES.group_in(&bytes), None);
        prop_assert_eq!(SERIES.group_in(&before[..cut.index(used)]), None);
    }

    #[test]
    fn other_bytes_do_not_count(bytes in prop::collection::vec(any::<u8>(), 0..200), len: u32) {
        prop_assert_eq!(SERIES.group_in(&bytes), None);
        // With a header that fits, and any length.
        let mut header = group(0, &bytes);
        header[40..44].copy_from_slice(&len.to_le_bytes());
        prop_assert_eq!(SERIES.group_in(&header).is_some(), len as usize == bytes.len());
    }
}

#[test]
fn groups_of_another_store_or_generation_do_not_count() {
    let bytes = group(0, b"records");
    for other in [
        Series { store: StoreId([4; 16]), ..SERIES },
        Series { generation: 8, ..SERIES },
        Series { generation: 10, ..SERIES },
    ] {
        assert_eq!(other.group_in(&bytes), None);
    }
}

/// The byte map of docs/reference/on-disk-format.md, by hand.
#[test]
fn bytes_are_where_the_document_says() {
    let bytes = group(0x0102, b"1234");
    assert_eq!((&bytes[..8], &bytes[8..24]), (b"RIPGROUP".as_slice(), [3; 16].as_slice()));
    assert_eq!((bytes[24], &bytes[32..34], bytes[40]), (9, [2, 1].as_slice(), 4));
    let mut unsealed = bytes.clone();
    unsealed[44..48].fill(0);
    assert_eq!(bytes[44..48], crc32c::crc32c(&unsealed[..52]).to_le_bytes());
    assert_eq!((&bytes[48..52], bytes.len()), (b"1234".as_slice(), 512));
}
