use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn span(first: u64, last: u64) -> IovaSpan {
    IovaSpan { first, last }
}

#[test]
fn small_regions_are_packed_with_a_page_between() {
    let mut iova = IovaAllocator::new(vec![span(0, u64::MAX)], PAGE);
    assert_eq!(iova.allocate(PAGE, 0), Some(Iova(FLOOR)));
    assert_eq!(iova.allocate(2 * PAGE, 0), Some(Iova(FLOOR + 2 * PAGE)));
    assert_eq!(iova.allocate(PAGE, 0), Some(Iova(FLOOR + 5 * PAGE)));
    assert_eq!(iova.release(Iova(FLOOR + 2 * PAGE)), Some(2 * PAGE));
    assert_eq!(iova.release(Iova(FLOOR + 2 * PAGE)), None);
    assert_eq!(iova.allocate(PAGE, 0), Some(Iova(FLOOR + 2 * PAGE)));
}

#[test]
fn large_regions_allow_large_pages() {
    let mut iova = IovaAllocator::new(vec![span(0, 0x7f_ffff_ffff)], PAGE);
    assert_eq!(iova.allocate(4 * MIB, 0x7f00_0020_0000), Some(Iova(2 * MIB)));
    // Memory that begins inside a large page gets an address with the same offset.
    let odd = iova.allocate(4 * MIB, 0x7f00_0001_3000).unwrap();
    assert_eq!(odd.0 % (2 * MIB), 0x1_3000);
    assert_eq!(iova.allocate(1 << 30, 0x40_0000_0000).unwrap().0 % (1 << 30), 0);
}

#[test]
fn reserved_ranges_are_left_out() {
    let valid = vec![span(0, FLOOR + 2 * PAGE - 1), span(0xfef0_0000, u64::MAX)];
    let mut iova = IovaAllocator::new(valid, PAGE);
    assert_eq!(iova.allocate(3 * PAGE, 0), Some(Iova(0xfef0_0000)));
    assert_eq!(iova.allocate(2 * PAGE, 0), Some(Iova(FLOOR)));
    assert_eq!(iova.allocate(PAGE + 1, 0), None, "not whole pages");
    assert_eq!(iova.allocate(0, 0), None);
    assert_eq!(iova.allocate(u64::MAX / PAGE * PAGE, 0), None);
}

#[test]
fn what_pci_devices_have_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::new(folder.path()).unwrap();
    let files = [
        // A bridge: no BARs, then I/O ports and two windows.
        (
            "0000:64:01.0",
            "0x0 0x0 0x0\n0xe000 0xefff 0x101\n0x90000000 0x97ffffff 0x200\n\
          0x380000000000 0x381fffffffff 0x102201\n",
        ),
        ("0000:67:00.0", "0x90000000 0x90003fff 0x140204\n0x0 0x0 0x0\n"),
    ];
    for (name, text) in files {
        let file = root.at(format!("/sys/bus/pci/devices/{name}/resource"));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    let windows = pci_windows(&root);
    assert_eq!(windows.len(), 3, "{windows:?}");
    let valid = without(vec![span(0, 0xfedf_ffff), span(0xfef0_0000, u64::MAX)], &windows, PAGE);
    let expected = [
        span(0, 0x8fff_ffff),
        span(0x9800_0000, 0xfedf_ffff),
        span(0xfef0_0000, 0x37ff_ffff_ffff),
        span(0x3820_0000_0000, u64::MAX),
    ];
    assert_eq!(valid, expected);
    let mut iova = IovaAllocator::new(valid, PAGE);
    // From 1 MiB on 0x8ff00000 bytes are free before the first window.
    assert_eq!(iova.allocate(0x9000_0000, 0), Some(Iova(0x1_0000_0000)));
}

#[test]
fn holes_are_whole_pages_and_may_take_everything() {
    let cut = |spans, hole| without(spans, &[hole], PAGE);
    assert_eq!(
        cut(vec![span(0, 0x3fff)], span(0x1800, 0x1fff)),
        [span(0, 0xfff), span(0x2000, 0x3fff)]
    );
    assert_eq!(cut(vec![span(0x1000, 0x1fff)], span(0, u64::MAX)), []);
    assert_eq!(cut(vec![span(0x1000, 0x1fff)], span(0x2000, 0x2fff)), [span(0x1000, 0x1fff)]);
}

#[test]
fn a_range_may_end_with_the_address_space() {
    let mut iova = IovaAllocator::new(vec![span(u64::MAX - 2 * PAGE + 1, u64::MAX)], PAGE);
    assert_eq!(iova.allocate(2 * PAGE, 0), Some(Iova(u64::MAX - 2 * PAGE + 1)));
    assert_eq!(iova.allocate(PAGE, 0), None);
}

#[test]
fn narrower_ranges_must_contain_what_is_there() {
    let mut iova = IovaAllocator::new(vec![span(0, u64::MAX)], PAGE);
    iova.allocate(PAGE, 0).unwrap();
    let taken = span(FLOOR, FLOOR + PAGE - 1);
    assert_eq!(iova.set_valid(vec![span(FLOOR + PAGE, u64::MAX)], PAGE), Err(taken));
    assert_eq!(iova.set_valid(vec![taken], PAGE), Ok(()));
    assert_eq!(iova.allocate(PAGE, 0), None);
}

#[derive(Debug, Clone)]
enum Step {
    Allocate { pages: u64, host_page: u64 },
    Release(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    let pages = prop_oneof![1..8u64, 500..600u64];
    prop_oneof![
        3 => (pages, 0..1024u64)
            .prop_map(|(pages, host_page)| Step::Allocate { pages, host_page }),
        2 => any::<prop::sample::Index>().prop_map(Step::Release),
    ]
}

/// Generates ranges in pages: gaps and lengths, from the floor on.
fn spans() -> impl Strategy<Value = Vec<IovaSpan>> {
    prop::collection::vec((0..6u64, 1..700u64), 1..5).prop_map(|parts| {
        let mut at = FLOOR / PAGE - 3;
        let mut spans: Vec<IovaSpan> = Vec::new();
        for (gap, pages) in parts {
            let first = at + gap;
            at = first + pages;
            spans.push(span(first * PAGE, at * PAGE - 1));
        }
        spans
    })
}

proptest! {
    /// Compares the allocator with a model that marks every page.
    #[test]
    fn like_a_map_of_pages(valid in spans(), steps in prop::collection::vec(step(), 1..40)) {
        let mut iova = IovaAllocator::new(valid.clone(), PAGE);
        let end = valid.last().unwrap().last / PAGE + 8;
        let usable = |page: u64| page >= FLOOR / PAGE && valid.iter()
            .any(|s| s.first <= page * PAGE && page * PAGE < s.last);
        let mut live: Vec<(u64, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Release(index) if !live.is_empty() => {
                    let (first, pages) = live.swap_remove(index.index(live.len()));
                    prop_assert_eq!(iova.release(Iova(first * PAGE)), Some(pages * PAGE));
                }
                Step::Release(_) => prop_assert_eq!(iova.release(Iova(PAGE + 1)), None),
                Step::Allocate { pages, host_page } => {
                    // Fits: usable pages of one range, none taken, guards kept.
                    let fits = |at: u64| {
                        let one = valid.iter().any(|s| {
                            s.first <= at * PAGE && (at + pages) * PAGE - 1 <= s.last
                        });
                        one && (at..at + pages).all(usable) && live.iter().all(|&(f, p)| {
                            at + pages < f || f + p < at
                        })
                    };
                    match iova.allocate(pages * PAGE, host_page * PAGE) {
                        Some(at) => {
                            prop_assert_eq!(at.0 % PAGE, 0);
                            prop_assert!(fits(at.0 / PAGE), "{:?}", at);
                            live.push((at.0 / PAGE, pages));
                        }
                        None => prop_assert!(!(0..end).any(fits), "there was room"),
                    }
                }
            }
        }
    }
}
