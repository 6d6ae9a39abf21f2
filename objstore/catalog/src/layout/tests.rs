use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

fn shape(layers: u32, segments: u32, object_bytes: u32) -> KvShape {
    KvShape { layers, segments, object_bytes, block_tokens: 16 }
}

fn region(bytes: u64, lba_shift: u8) -> Region {
    Region { first: Lba(0), lbas: bytes >> lba_shift, lba_shift }
}

prop_compose! {
    fn geometries()(
        devices in 1u32..9, width in 1u32..70, layers in 1u32..40, segments in 1u32..3,
        object_bytes in 1u32..200_000, lba_shift in prop_oneof![Just(9u32), Just(12u32)],
    ) -> Geometry {
        let shape = shape(layers, segments, object_bytes);
        Geometry::new(&shape, devices, devices * width, 1 << lba_shift).unwrap()
    }
}

proptest! {
    #[test]
    fn every_object_is_found_again(g in geometries(), file in any::<u32>(), row in any::<u32>()) {
        let (file, row) = (FileId(file), Row(row % g.rows));
        prop_assert_eq!(g.at(g.object(file, row)), Some((file, row)));
    }

    #[test]
    fn every_slot_has_its_object(g in geometries(), device in 0u32..9, slot in 0u64..1_000_000) {
        let place = ObjectPlace { device: DeviceIndex(device), slot: Slot(slot) };
        match g.at(place) {
            Some((file, row)) => prop_assert_eq!(g.object(file, row), place),
            None => prop_assert!(device >= g.devices),
        }
    }

    #[test]
    fn whole_groups_fill_their_extents_without_holes(
        devices in 1u32..6, width in 1u32..6, rows in 1u32..9, groups in 1u32..4,
    ) {
        let g = Geometry::new(&shape(rows, 1, 4096), devices, devices * width, 4096).unwrap();
        let mut seen = HashSet::new();
        for file in 0..groups * g.group {
            for row in 0..rows {
                let place = g.object(FileId(file), Row(row));
                prop_assert!(seen.insert(place), "two objects in {:?}", place);
            }
        }
        let slots = u64::from(groups * rows * width);
        prop_assert_eq!(seen.len() as u64, slots * u64::from(devices));
        prop_assert!(seen.iter().all(|place| place.slot.0 < slots));
        let files = u64::from(groups * g.group);
        prop_assert_eq!(g.bytes_per_device(files), slots * u64::from(g.slot_bytes));
    }

    #[test]
    fn a_row_of_one_group_is_even_and_contiguous_on_each_device(
        g in geometries(), start in 0u32..10_000, row in any::<u32>(),
    ) {
        let row = Row(row % g.rows);
        let first = start / g.group * g.group;
        for device in 0..g.devices {
            let slots: Vec<u64> = (first..first + g.group)
                .map(|file| g.object(FileId(file), row))
                .filter(|place| place.device.0 == device)
                .map(|place| place.slot.0)
                .collect();
            prop_assert_eq!(slots.len(), g.width() as usize);
            prop_assert!(slots.windows(2).all(|pair| pair[1] == pair[0] + 1));
        }
    }

    #[test]
    fn any_run_of_files_is_spread_evenly(
        g in geometries(), start in 0u32..100_000, len in 1u32..300, row in any::<u32>(),
    ) {
        let row = Row(row % g.rows);
        let mut counts = vec![0u32; g.devices as usize];
        for file in start..start + len {
            counts[g.object(FileId(file), row).device.0 as usize] += 1;
        }
        // Groups are multiples of N, so the rotation over devices continues across their borders.
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        prop_assert!(most - least <= 1, "{:?}", counts);
    }

    #[test]
    fn lbas_of_objects_never_overlap(
        g in geometries(), a in any::<(u16, u16)>(), b in any::<(u16, u16)>(),
    ) {
        let region = Region { first: Lba(77), lbas: u64::MAX, lba_shift: 9 };
        let object = |(file, row): (u16, u16)| {
            g.object(FileId(file.into()), Row(u32::from(row) % g.rows))
        };
        let (a, b) = (object(a), object(b));
        prop_assume!(a != b && a.device == b.device);
        let (x, y) = (g.lba(&region, a.slot).0, g.lba(&region, b.slot).0);
        prop_assert!(x.abs_diff(y) >= u64::from(g.slot_bytes >> 9));
        prop_assert!(x >= 77);
    }

    #[test]
    fn what_is_said_to_fit_does_fit(
        g in geometries(), bytes in 1u64..1 << 34, capacity in proptest::option::of(1u64..1 << 34),
    ) {
        let regions = vec![region(bytes, 9); g.devices as usize];
        match g.files_in(&regions, capacity) {
            Ok(files) => {
                prop_assert!(files > 0);
                prop_assert!(u64::from(files) * g.file_bytes() <= capacity.unwrap_or(u64::MAX));
                prop_assert!(g.bytes_per_device(files.into()) <= regions[0].bytes());
                let last = g.object(FileId(files - 1), Row(g.rows - 1));
                let end = g.lba(&regions[0], last.slot).0 + u64::from(g.slot_bytes >> 9);
                prop_assert!(end <= regions[0].lbas);
            }
            Err(LayoutError::TooSmall { needed, given, .. }) => prop_assert!(needed > given),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

#[test]
fn the_formula_of_the_abi_by_hand() {
    // 3 devices, groups of 6, 4 rows: file 8 is k = 2 of group 1.
    let g = Geometry::new(&shape(2, 2, 5000), 3, 6, 4096).unwrap();
    assert_eq!(g.slot_bytes, 8192);
    let place = g.object(FileId(8), Row(3));
    assert_eq!(place, ObjectPlace { device: DeviceIndex(2), slot: Slot((4 + 3) * 2) });
    let region = Region { first: Lba(100), lbas: 1 << 20, lba_shift: 9 };
    assert_eq!(g.lba(&region, place.slot), Lba(100 + 14 * 16));
}

#[test]
fn llama_3_8b_at_16_tokens_needs_what_the_facts_say() {
    let shape = shape(32, 2, 32 * 1024);
    assert_eq!(shape.token_bytes(), 128 * 1024);
    let g = Geometry::new(&shape, 4, 256, 4096).unwrap();
    // 128K tokens of context are 8192 files and 16 GiB.
    let files = 128 * 1024 / u64::from(shape.block_tokens);
    assert_eq!((files, 4 * g.bytes_per_device(files)), (8192, 16 << 30));
}

#[test]
fn errors_say_what_is_needed_and_what_was_given() {
    let s = shape(2, 1, 4096);
    let g = Geometry::new(&s, 1, 4, 4096).unwrap();
    let small = g.files_in(&[region(16 * 1024, 12)], None).unwrap_err().to_string();
    assert!(small.contains("32768") && small.contains("16384"), "{small}");
    let cap = g.files_in(&[region(1 << 20, 12)], Some(8191)).unwrap_err().to_string();
    assert!(cap.contains("8192") && cap.contains("8191"), "{cap}");
    let said =
        |devices, lba_bytes| Geometry::new(&s, devices, 4, lba_bytes).unwrap_err().to_string();
    assert!(said(3, 512).starts_with("a group of 4 files cannot be spread over 3 devices"));
    assert!(said(1, 520).starts_with("an LBA size of 520 bytes"));
    assert!(Geometry::new(&shape(0, 1, 1), 1, 1, 512).is_err());
    assert!(Geometry::for_regions(&s, &[]).is_err());
}

/// A group of 2^30 files per device with 64 TiB each: its bytes used to overflow to 0.
#[test]
fn a_group_that_does_not_fit_into_64_bits_is_refused() {
    let error = Geometry::new(&shape(65_535, 1, 1 << 30), 2, 1 << 31, 4096).unwrap_err();
    assert!(error.to_string().contains("does not fit into 64 bits"), "{error}");
    let largest = Geometry::new(&shape(65_535, 1, 1 << 30), 2, 2 << 17, 4096).unwrap();
    assert!(matches!(
        largest.files_in(&[region(1 << 40, 12); 2], None),
        Err(LayoutError::TooSmall { .. })
    ));
}

/// Shapes that the ring cannot represent are refused before a pool is registered.
#[test]
fn as_many_rows_as_a_ring_takes_and_no_more() {
    shape(65_535, 1, 4096).validate().unwrap();
    assert!(shape(1 << 15, 2, 4096).validate().is_err());
}

#[test]
fn the_default_group_shrinks_with_the_region() {
    let s = shape(4, 2, 4096); // 32 KiB a file
    let large = Geometry::for_regions(&s, &[region(1 << 30, 12); 2]).unwrap();
    assert_eq!(large.group, 2 * GROUP_WIDTH);
    let small = Geometry::for_regions(&s, &[region(1 << 20, 12); 2]).unwrap();
    assert_eq!(small.group, 8);
    let tiny = Geometry::for_regions(&s, &[region(40_000, 9), region(1 << 20, 12)]).unwrap();
    assert_eq!(tiny.group, 2);
    assert_eq!(tiny.files_in(&[region(40_000, 9), region(1 << 20, 12)], None).unwrap(), 2);
}
