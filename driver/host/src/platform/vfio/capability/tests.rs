use proptest::prelude::*;

use super::*;

/// Builds an answer whose capabilities follow a header of 24 bytes.
fn answer(caps: &[(u16, Vec<u8>)]) -> Answer {
    let mut bytes = vec![0xEE; 24];
    for (index, (id, body)) in caps.iter().enumerate() {
        let next = bytes.len() + HEADER_BYTES + body.len();
        let next = if index + 1 == caps.len() { 0 } else { next as u32 };
        bytes.extend(id.to_ne_bytes());
        bytes.extend(1u16.to_ne_bytes());
        bytes.extend(next.to_ne_bytes());
        bytes.extend(body);
    }
    Answer { bytes, first: if caps.is_empty() { 0 } else { 24 } }
}

fn list(count: u32, pairs: &[(u64, u64)]) -> Vec<u8> {
    let mut body = count.to_ne_bytes().to_vec();
    body.extend([0; 4]);
    for (a, b) in pairs {
        body.extend(a.to_ne_bytes());
        body.extend(b.to_ne_bytes());
    }
    body
}

#[test]
fn iommu_info() {
    // Reported by a kernel on an Intel IOMMU with 39 address bits; MSI addresses are left out.
    let pairs = [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)];
    let info =
        answer(&[(2, vec![0; 24]), (1, list(2, &pairs)), (3, 65_535u32.to_ne_bytes().to_vec())]);
    let spans = info.iova_spans().unwrap();
    assert_eq!(spans, pairs.map(|(first, last)| IovaSpan { first, last }));
    assert_eq!(info.dma_available(), Some(65_535));
    // Identifiers depend on the answer: 1 is also the id of sparse areas.
    assert!(answer(&[(3, vec![])]).sparse_areas().is_none());
}

#[test]
fn nothing_there() {
    assert_eq!(Answer::default().iova_spans(), None);
    assert_eq!(answer(&[]).dma_available(), None);
    assert_eq!(answer(&[(9, vec![])]).iova_spans(), None);
}

#[test]
fn lies() {
    // More entries than the answer has bytes for, and ranges that end before they begin.
    let info = answer(&[(1, list(u32::MAX, &[(5, 3), (7, 9)]))]);
    assert_eq!(info.iova_spans(), Some(vec![IovaSpan { first: 7, last: 9 }]));
    // A chain that points to itself.
    let mut looped = answer(&[(2, vec![])]);
    looped.bytes[28..32].copy_from_slice(&24u32.to_ne_bytes());
    assert_eq!(looped.dma_available(), None);
    // Truncated in a header, and in a body.
    for cut in 24..looped.bytes.len() {
        let bytes = looped.bytes[..cut].to_vec();
        assert_eq!(Answer { bytes, first: 24 }.iova_spans(), None);
    }
}

#[test]
fn sparse_bar() {
    // The MSI-X table is in the third page.
    let info = answer(&[(1, list(2, &[(0, 0x2000), (0x3000, 0x1000)])), (3, vec![])]);
    assert!(info.msix_mappable());
    let areas = mappable(0x4000, info.sparse_areas(), 4096);
    let area = |offset, len| Area { offset, len };
    assert_eq!(areas, [area(0, 0x2000), area(0x3000, 0x1000)]);
    // Adjacent areas are merged; partial pages and anything outside the BAR are cut off.
    let touching = vec![area(0x1000, 0x1000), area(0, 0x1000), area(0x2800, 0x9000)];
    assert_eq!(mappable(0x4000, Some(touching), 4096), [area(0, 0x2000), area(0x3000, 0x1000)]);
    assert_eq!(mappable(0x4000, None, 4096), [area(0, 0x4000)]);
    assert_eq!(mappable(0x4000, Some(vec![]), 4096), []);
    assert_eq!(mappable(0x800, None, 4096), []);
}

proptest! {
    #[test]
    fn no_bytes_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..96),
        first in 0u32..128,
    ) {
        let answer = Answer { bytes, first };
        answer.iova_spans();
        answer.dma_available();
        answer.sparse_areas();
        answer.msix_mappable();
    }

    #[test]
    fn mappable_parts_are_pages_of_what_was_offered(
        size in 0u64..0x2_0000,
        offered in prop::option::of(
            prop::collection::vec((0u64..0x2_4000, 0u64..0x9000), 0..6)
        ),
    ) {
        let offered: Option<Vec<Area>> = offered
            .map(|all| all.into_iter().map(|(offset, len)| Area { offset, len }).collect());
        let inside = |at: u64| at < size && offered.as_ref().is_none_or(|all| {
            all.iter().any(|a| (a.offset..a.offset + a.len).contains(&at))
        });
        let areas = mappable(size, offered.clone(), 4096);
        for area in &areas {
            prop_assert!(area.len > 0 && area.offset % 4096 == 0 && area.len % 4096 == 0);
            for at in (area.offset..area.offset + area.len).step_by(512) {
                prop_assert!(inside(at));
            }
        }
        prop_assert!(areas.windows(2).all(|w| w[0].offset + w[0].len < w[1].offset));
        // A page that one area fully covers is never left out.
        for page in (0..size / 4096).map(|n| n * 4096) {
            let whole = offered.as_ref().is_none_or(|all| all.iter().any(|a| {
                a.offset <= page && page + 4096 <= a.offset + a.len
            }));
            let mapped = areas.iter().any(|a| (a.offset..a.offset + a.len).contains(&page));
            prop_assert_eq!(whole, mapped || (whole && page + 4096 > size));
        }
    }
}
