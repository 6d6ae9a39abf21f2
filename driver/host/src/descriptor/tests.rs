//! Tests of the builders against walkers written from the specification, with random transfers.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Descriptor memory: 8-byte groups by address.
struct Area {
    iova: u64,
    words: Vec<u64>,
    written: BTreeMap<u64, u64>,
}

impl Area {
    fn new(iova: u64, bytes: usize) -> Self {
        Self { iova, words: vec![0; bytes / 8], written: BTreeMap::new() }
    }

    /// Fetches a group, as a controller does; fetching one that was never written is an error.
    fn fetch(&self, iova: u64) -> u64 {
        *self.written.get(&iova).unwrap_or_else(|| panic!("{iova:#x} was never written"))
    }
}

impl DescriptorArea for Area {
    fn iova(&self) -> Iova {
        Iova(self.iova)
    }
    fn len(&self) -> usize {
        self.words.len() * 8
    }
    fn write64(&mut self, index: usize, value: u64) {
        self.words[index] = value;
        assert_eq!(self.written.insert(self.iova + index as u64 * 8, value), None, "written twice");
    }
}

type Bytes = Vec<(u64, u64)>;

/// Merges neighbors, so that lists of ranges compare by the bytes they name, in order.
fn joined(ranges: impl IntoIterator<Item = (u64, u64)>) -> Bytes {
    let mut out = Bytes::new();
    for (iova, len) in ranges {
        match out.last_mut() {
            Some((start, bytes)) if *start + *bytes == iova => *bytes += len,
            _ => out.push((iova, len)),
        }
    }
    out
}

fn walk_prp(pointer: &Descriptor, total: u64, page: u64, area: &Area) -> Bytes {
    let DataPointer { prp1, prp2 } = pointer.dptr;
    assert_eq!(prp1 % 4, 0);
    let first = total.min(page - prp1 % page);
    let (mut out, mut left) = (vec![(prp1, first)], total - first);
    if left > page {
        let mut at = prp2;
        while left > 0 {
            let mut entry = area.fetch(at);
            if at % page == page - 8 && left > page {
                at = entry;
                assert_eq!(at % page, 0, "a chained list begins at a page");
                entry = area.fetch(at);
            }
            assert_eq!(entry % page, 0, "only PRP1 has an offset");
            out.push((entry, left.min(page)));
            left -= left.min(page);
            at += 8;
        }
    } else if left > 0 {
        assert_eq!(prp2 % page, 0);
        out.push((prp2, left));
    }
    joined(out)
}

fn walk_sgl(pointer: &Descriptor, segment_bytes: u64, area: &Area) -> Bytes {
    let split = |words: [u64; 2]| (words[0], words[1] & 0xFFFF_FFFF, words[1] >> 56);
    let (mut iova, mut len, mut kind) = split(zerocopy::transmute!(pointer.dptr));
    let mut out = Bytes::new();
    if kind == 0x00 {
        out.push((iova, len));
        return out;
    }
    loop {
        assert!(kind == 0x20 || kind == 0x30, "a segment, found {kind:#x}");
        assert!(len <= segment_bytes && len % 16 == 0 && len > 0 && iova % 16 == 0);
        let entries: Vec<_> = (0..len / 16)
            .map(|i| split([area.fetch(iova + i * 16), area.fetch(iova + i * 16 + 8)]))
            .collect();
        let last = kind == 0x30;
        let blocks = if last { &entries[..] } else { &entries[..entries.len() - 1] };
        for (iova, len, kind) in blocks {
            assert_eq!(*kind, 0, "a data block");
            out.push((*iova, *len));
        }
        if last {
            return joined(out);
        }
        (iova, len, kind) = entries[entries.len() - 1];
    }
}

fn ranges(parts: &[(u64, u64)]) -> Vec<IovaRange> {
    parts.iter().map(|&(iova, len)| IovaRange { iova: Iova(iova), len }).collect()
}

const SGL: DescriptorMode = DescriptorMode::Sgl { bit_bucket: false, granularity: 1 };
const PRP: DescriptorMode = DescriptorMode::Prp { page_bytes: 4096 };

/// Generates parts that PRPs can name: whole pages, any dword offset at the start, any end.
fn prp_parts() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let pages = prop::collection::vec((1u64..1 << 30, 1u64..700), 1..5);
    (pages, 0u64..1024, 1u64..=4096).prop_map(|(pages, skip, tail)| {
        let mut parts: Vec<_> = pages.iter().map(|&(at, n)| (at * 4096, n * 4096)).collect();
        parts[0].0 += skip * 4;
        parts[0].1 -= skip * 4;
        let last = parts.last_mut().unwrap();
        let cut = (4096 - tail).min(last.1.saturating_sub(1));
        last.1 -= cut;
        parts
    })
}

proptest! {
    #[test]
    fn sgl_names_the_same_bytes(
        parts in prop::collection::vec((1u64..1 << 40, 1u64..1 << 20), 1..300),
        segment in prop::sample::select(vec![32u32, 48, 256, 4096]),
    ) {
        let mut area = Area::new(0x7000_0000, 1 << 16);
        let pointer = describe(SGL, &ranges(&parts), segment, &mut area).unwrap();
        prop_assert_eq!(pointer.psdt, Psdt::SGL_MPTR_ADDRESS);
        prop_assert_eq!(walk_sgl(&pointer, u64::from(segment), &area), joined(parts));
    }

    #[test]
    fn prp_names_the_same_bytes(parts in prp_parts(), list_at in 0u64..512) {
        let mut area = Area::new(0x7000_0000 + list_at * 8, 1 << 16);
        let total = parts.iter().map(|p| p.1).sum();
        let pointer = describe(PRP, &ranges(&parts), 4096, &mut area).unwrap();
        prop_assert_eq!(pointer.psdt, Psdt::PRP);
        prop_assert_eq!(walk_prp(&pointer, total, 4096, &area), joined(parts));
    }

    /// The computed sizes are exact: one word less is refused, and nothing is written outside (Area
    /// would panic).
    #[test]
    fn area_sizes_are_exact(parts in prp_parts(), sgl in any::<bool>()) {
        let (mode, segment) = if sgl { (SGL, 48) } else { (PRP, 4096) };
        let mut roomy = Area::new(0x7000_0000, 1 << 16);
        describe(mode, &ranges(&parts), segment, &mut roomy).unwrap();
        let used = roomy.written.len() * 8;
        if used > 0 {
            let mut tight = Area::new(0x7000_0000, used);
            prop_assert!(describe(mode, &ranges(&parts), segment, &mut tight).is_ok());
            let mut small = Area::new(0x7000_0000, used - 8);
            let refused = describe(mode, &ranges(&parts), segment, &mut small);
            let error = DescriptorError::AreaTooSmall { need: used, have: used - 8 };
            prop_assert_eq!(refused, Err(error));
        }
    }

    #[test]
    fn any_input_is_an_answer(
        parts in prop::collection::vec(any::<(u64, u64)>(), 0..6),
        mode in 0u8..3,
        bytes in 0usize..9000,
    ) {
        let shrink = |&(at, len): &(u64, u64)| (at >> (at % 60), len >> (len % 64));
        let small: Vec<_> = parts.iter().map(shrink).collect();
        let mode = match mode {
            0 => SGL,
            1 => DescriptorMode::Sgl { bit_bucket: true, granularity: 4 },
            _ => PRP,
        };
        // An answer or an error, never a panic.
        let _ = describe(mode, &ranges(&small), 4096, &mut Area::new(0x1000, bytes));
        let _ = describe(mode, &ranges(&parts), 4096, &mut Area::new(0x1000, bytes));
    }
}

#[test]
fn odd_addresses_are_for_byte_sgls_only() {
    let odd = ranges(&[(0x1001, 513), (0x5003, 511)]);
    let mut area = Area::new(0x9000, 4096);
    assert!(describe(SGL, &odd, 4096, &mut area).is_ok());
    let dword = DescriptorMode::Sgl { bit_bucket: false, granularity: 4 };
    assert!(matches!(
        describe(dword, &odd, 4096, &mut area),
        Err(DescriptorError::Granularity { part: 0, granularity: 4, .. })
    ));
    assert!(matches!(
        describe(PRP, &odd, 4096, &mut area),
        Err(DescriptorError::NotPages { part: 0, .. })
    ));
}

#[test]
fn holes_in_pages_are_refused_by_prp() {
    let mut area = Area::new(0x9000, 4096);
    let ends_inside = ranges(&[(0x1000, 512), (0x3000, 512)]);
    let begins_inside = ranges(&[(0x1000, 4096), (0x3200, 512)]);
    for (parts, bad) in [(ends_inside, 0), (begins_inside, 1)] {
        match describe(PRP, &parts, 4096, &mut area) {
            Err(DescriptorError::NotPages { part, .. }) => assert_eq!(part, bad),
            other => panic!("expected NotPages, found {other:?}"),
        }
    }
}

#[test]
fn transfer_limits() {
    assert_eq!(transfer_bytes_max(PRP, 4096), Some(512 * 4096));
    assert_eq!(transfer_bytes_max(PRP, 64), Some(8 * 4096));
    assert_eq!(transfer_bytes_max(SGL, 4096), None);
}
