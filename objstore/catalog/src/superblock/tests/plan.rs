//! Sizes and offsets of a plan.

use proptest::prelude::*;

use super::*;
use crate::{error::LayoutError, record, superblock::GROUP_HEADER_BYTES};

proptest! {
    #[test]
    fn areas_fit_and_do_not_overlap(
        mib in 6u64..4096, shift in 0u32..8, count in 1u8..5, layers in 1u32..80,
        object_pages in 1u32..40, checksums in any::<bool>(), namespaces_max in 1u32..5000,
        files_max in prop::option::of(1u32..20_000),
    ) {
        let lba_bytes = 512 << shift;
        let lbas = (mib << 20) / u64::from(lba_bytes);
        let devices: Vec<_> = (0..count).map(|number| device(number, lba_bytes, lbas)).collect();
        let shape = KvShape { layers, object_bytes: object_pages << 9, ..SHAPE };
        let plan = Plan { shape, checksums, namespaces_max, files_max, ..plan(&devices) };
        let superblocks = match plan.superblocks() {
            Ok(superblocks) => superblocks,
            Err(FormatError::Layout(LayoutError::TooSmall { .. })) => return Ok(()),
            Err(error) => panic!("{error}"),
        };
        let first = &superblocks[0];
        let (layout, data, journal) = (first.layout, first.data.unwrap(), first.journal.unwrap());
        let half = journal.half_bytes;
        prop_assert_eq!(journal.offset, 1 << 20);
        prop_assert!(journal.offset + 2 * half <= data.offset);
        prop_assert!(data.offset.is_multiple_of(1 << 20) && data.offset + data.bytes <= mib << 20);
        prop_assert!(files_max.is_none_or(|files| layout.files <= files));
        // The snapshot of a full store, in groups that are cut between records.
        let commit = record::commit_bytes(layout.words_per_file as usize) as u64;
        let group = u64::from(journal.group_bytes_max);
        let largest = commit.max(record::NAMESPACE_BYTES_MAX as u64);
        let more = record::USE_BYTES as u64;
        let raw = u64::from(layout.files) * (commit + more)
            + u64::from(namespaces_max) * record::NAMESPACE_BYTES_MAX as u64;
        let groups = raw.div_ceil(group - GROUP_HEADER_BYTES - largest) + 1;
        prop_assert!(3 * groups * group <= half, "{} groups of {} in {}", groups, group, half);
        prop_assert!(group >= GROUP_HEADER_BYTES + 2 * largest && group <= 1 << 20);
        prop_assert!(half >= 16 * group);
        // All of them can be decoded, and only the first has a journal.
        for (number, superblock) in superblocks.iter().enumerate() {
            let again = Superblock::decode(&superblock.encode());
            prop_assert_eq!(again.as_ref(), Ok(superblock));
            prop_assert_eq!(superblock.journal.is_some(), number == 0);
            prop_assert_eq!((superblock.layout, superblock.data), (layout, Some(data)));
        }
        // Little space is left unused: less than a group of files with its journal needs.
        let group_bytes = first.geometry().unwrap().group_bytes_per_device();
        let group_journal = raw / u64::from(layout.files) * u64::from(data.group) * 6;
        if files_max.is_none() {
            let rest = (mib << 20) - (data.offset + data.bytes);
            let usual = 2 * (group_bytes + group_journal) + (2 << 20) + 2 * half / 10;
            prop_assert!(rest < usual, "{rest} left of {mib} MiB, {first:?}");
        }
    }
}

#[test]
fn a_codec_gives_more_files() {
    let one = [device(0, 512, 64 << 11)];
    let of = |codec| Plan { codec, ..plan(&one) }.superblocks().unwrap().swap_remove(0);
    let (raw, encoded) = (of(Codec::None), of(Codec::Exp3));
    assert_eq!(raw.data.unwrap().slot_bytes, 4096);
    assert_eq!(encoded.data.unwrap().slot_bytes, 3072);
    let [raw, encoded] = [raw, encoded].map(|it| it.layout.files);
    assert!(100 * encoded >= 130 * raw, "{encoded} files instead of {raw}");
}

#[test]
fn ten_million_files_of_a_model_take_little_journal() {
    let devices: Vec<_> = (0..4).map(|number| device(number, 4096, 12 << 28)).collect();
    let shape = KvShape { layers: 32, segments: 1, object_bytes: 128 << 10, block_tokens: 16 };
    let files_max = Some(10_000_000);
    let plan = Plan { shape, files_max, namespaces_max: 4096, ..plan(&devices) };
    let superblocks = plan.superblocks().unwrap();
    let (layout, journal) = (superblocks[0].layout, superblocks[0].journal.unwrap());
    assert_eq!((layout.files, layout.words_per_file), (10_000_000, 32));
    let data = layout.files as u64 * 32 * (128 << 10);
    assert!(2 * journal.half_bytes < data / 2500, "{journal:?}");
}

#[test]
fn what_cannot_be_planned_is_said() {
    let one = [device(0, 512, 8 << 11)];
    let error = |plan: Plan<'_>| plan.superblocks().unwrap_err().to_string();
    let devices = vec![one[0].clone(); DEVICES_MAX + 1];
    assert_eq!(error(plan(&devices)), "a rank has 1 to 76 devices, and 77 were given");
    assert!(plan(&devices[1..]).superblocks().is_ok());
    assert!(error(plan(&[])).starts_with("a rank has 1 to 76 devices"));
    assert!(error(Plan { rank: 1, ..plan(&one) }).starts_with("rank 1 of 1 ranks"));
    let shape = KvShape { layers: 65_535, segments: 1, object_bytes: 1, block_tokens: 1 };
    let many = error(Plan { shape, ranks: 2, ..plan(&one) });
    assert!(many.starts_with("131070 checksums a file are more than the 65525"), "{many}");
    assert!(error(Plan { data: false, ..plan(&one) }).contains("give files_max"));
    let odd = KvShape { object_bytes: 4096 + 64, ..SHAPE };
    let odd = error(Plan { shape: odd, codec: Codec::Exp3, ..plan(&one) });
    assert!(odd.contains("whole multiples of 128 bytes, and they have 4160"), "{odd}");
    let large = [device(0, 4096, 8 << 8)];
    let useless = error(Plan { codec: Codec::Exp3, ..plan(&large) });
    assert!(
        useless.contains("4096 bytes have 3072 with it, and take 4096 bytes either"),
        "{useless}"
    );
    let small = [device(0, 512, 100)];
    assert!(error(plan(&small)).contains("serial number S0, namespace 1: its region has 51200"));
    let small = [device(0, 512, 3 << 11)];
    let small = error(Plan { files_max: Some(1_000_000), data: false, ..plan(&small) });
    assert!(small.contains("its region has 3145728 bytes, and a store needs"), "{small}");
}
