//! The PRP and SGL walkers on random memory: every byte goes where a simple model predicts.

use nvme_spec::sgl::SglDescriptor;
use proptest::{prelude::*, test_runner::Config};

use super::*;

/// Pages of the memory that transfers scatter into.
const PAGES: u64 = 64;
/// Blocks on the medium.
const LBAS: u32 = 2048;

/// Runs a transfer both ways. `parts` are (offset, length) in `memory`, in order; a read must leave
/// all other bytes unchanged.
fn both_ways(
    host: &mut Host,
    memory: &Arc<dyn DmaMemory>,
    sqe: Sqe,
    parts: &[(u64, usize)],
) -> Result<(), TestCaseError> {
    let range = BlockRange::from_sqe(&sqe);
    let len = range.lbas().0 as usize * 512;
    let place = range.slba * 512;
    let mut model = pattern(memory.len(), 0x55);
    host.write(at(memory), &model);
    let data = pattern(len, range.slba as u8);
    host.media.poke(place, &data).unwrap();
    prop_assert_eq!(host.io(Sqe { opcode: NvmOpcode::READ.0, ..sqe }), Status::SUCCESS);
    let mut from = 0;
    for &(offset, len) in parts {
        model[offset as usize..][..len].copy_from_slice(&data[from..from + len]);
        from += len;
    }
    prop_assert_eq!(from, len);
    prop_assert!(host.read(at(memory), memory.len()) == model, "a read went elsewhere");

    let fresh = pattern(memory.len(), 0xaa);
    host.write(at(memory), &fresh);
    prop_assert_eq!(host.io(Sqe { opcode: NvmOpcode::WRITE.0, ..sqe }), Status::SUCCESS);
    let expected: Vec<u8> =
        parts.iter().flat_map(|&(offset, len)| fresh[offset as usize..][..len].to_vec()).collect();
    prop_assert!(host.stored(place, len) == expected, "a write took other bytes");
    Ok(())
}

/// Generates distinct pages in any order.
fn pages() -> impl Strategy<Value = Vec<u64>> {
    Just((0..PAGES).collect::<Vec<u64>>()).prop_shuffle()
}

proptest! {
    // proptest prints the failing input, which is more useful than a seed.
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(48) })]

    #[test]
    fn prps(
        pages in pages(),
        dwords in 0u64..1024,
        lbas in 1u32..=400,
        lba in 0u64..1600,
        list_slot in 0u64..512,
    ) {
        let mut host = Host::plain();
        let memory = host.alloc(PAGES as usize * PAGE);
        let lists = host.alloc(4 * PAGE);
        let (base, offset) = (at(&memory).0, dwords * 4);
        let mut left = lbas as usize * 512;
        let mut parts = Vec::new();
        for (index, page) in pages.iter().enumerate() {
            let skip = if index == 0 { offset } else { 0 };
            let len = left.min(PAGE - skip as usize);
            if len > 0 {
                parts.push((page * PAGE as u64 + skip, len));
            }
            left -= len;
        }
        let entries: Vec<u64> = parts.iter().map(|(at, _)| base + at).collect();
        let prp2 = match entries.len() {
            1 => 0,
            2 => entries[1],
            _ => write_list(&host, &lists, list_slot, &entries[1..]),
        };
        let sqe = nvm(NvmOpcode::READ, lba, lbas).with_prps(entries[0], prp2);
        both_ways(&mut host, &memory, sqe, &parts)?;
    }

    #[test]
    fn sgls(
        cuts in proptest::collection::vec(0usize..=4 * 512, 0..60),
        places in proptest::collection::vec((0u64..PAGES, 0u64..2048), 62),
        chain in proptest::collection::vec(any::<bool>(), 62),
        lba in 0u64..2000,
    ) {
        let mut host = Host::plain();
        let memory = host.alloc(PAGES as usize * PAGE);
        let lists = host.alloc(4 * PAGE);
        let lbas = 4;
        let mut cuts: Vec<usize> =
            cuts.into_iter().chain([0, lbas * 512]).collect();
        cuts.sort_unstable();
        // Each part in its own page, so that parts do not overlap.
        let mut used = [false; PAGES as usize];
        let mut parts = Vec::new();
        for (cut, (page, skip)) in cuts.windows(2).zip(places) {
            let free = (0..PAGES).map(|step| (page + step) % PAGES);
            let page = free.into_iter().find(|page| !used[*page as usize]).unwrap();
            used[page as usize] = true;
            parts.push((page * PAGE as u64 + skip, cut[1] - cut[0]));
        }
        let base = at(&memory).0;
        let items: Vec<SglDescriptor> = parts
            .iter()
            .map(|(at, len)| SglDescriptor::data_block(base + at, *len as u32))
            .collect();
        let sqe = nvm(NvmOpcode::READ, lba, lbas as u32);
        let sqe = sqe.with_sgl(write_sgl(&host, &lists, &items, &chain));
        both_ways(&mut host, &memory, sqe, &parts)?;
    }

    #[test]
    fn garbage_is_refused_or_harmless(
        sqes in proptest::collection::vec(
            (any::<[u8; 2]>(), 0u32..4, any::<[u64; 2]>(), any::<[u32; 6]>(), any::<bool>()),
            32,
        ),
        seed in any::<u8>(),
    ) {
        let mut host = Host::plain();
        let memory = host.alloc(4 * PAGE);
        host.write(at(&memory), &pattern(4 * PAGE, seed));
        let watched = host.alloc(PAGE);
        host.write(at(&watched), &pattern(PAGE, 1));
        for ([opcode, flags], nsid, dptr, cdw, near) in sqes {
            // Half of them with plausible values, which pass more checks.
            let opcode = if near { opcode & 0xf } else { opcode };
            let prps = if near { dptr.map(|word| at(&memory).0 + word % 16384) } else { dptr };
            let mut sqe = Sqe { opcode, flags, nsid, ..Sqe::default() };
            sqe.dptr = nvme_spec::sqe::DataPointer::from_prps(prps[0], prps[1]);
            [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15] = cdw;
            if near {
                (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (cdw[0] % LBAS, 0, cdw[2] & 0x3f);
            }
            let cid = host.send(1, sqe);
            let done = host.reap_all(1);
            prop_assert_eq!(done.iter().map(|cqe| cqe.cid).collect::<Vec<_>>(), [cid]);
        }
        prop_assert_eq!(host.csts().cfs(), 0);
        prop_assert!(host.read(at(&watched), PAGE) == pattern(PAGE, 1));
    }
}

/// Writes a PRP list that starts at entry `slot` of a page and continues in whole pages.
fn write_list(host: &Host, lists: &Arc<dyn DmaMemory>, slot: u64, entries: &[u64]) -> u64 {
    let start = at(lists).offset(slot * 8);
    let room = 512 - slot as usize;
    if entries.len() <= room {
        host.write(start, entries.as_bytes());
    } else {
        let (first, rest) = entries.split_at(room - 1);
        let next = at(lists).offset(PAGE as u64);
        host.write(start, first.as_bytes());
        host.write(start.offset(8 * (room as u64 - 1)), &next.0.to_le_bytes());
        host.write(next, rest.as_bytes());
    }
    start.0
}

/// Writes segments that end after each item where `chain` is set; returns the first descriptor.
fn write_sgl(
    host: &Host,
    lists: &Arc<dyn DmaMemory>,
    items: &[SglDescriptor],
    chain: &[bool],
) -> SglDescriptor {
    if let [one] = items {
        return *one;
    }
    let mut segments: Vec<Vec<SglDescriptor>> = vec![Vec::new()];
    for (item, end) in items.iter().zip(chain) {
        segments.last_mut().unwrap().push(*item);
        if *end {
            segments.push(Vec::new());
        }
    }
    segments.retain(|segment| !segment.is_empty());
    // From the back, because each points to the next one.
    let mut next: Option<SglDescriptor> = None;
    let mut place = at(lists);
    for mut segment in segments.into_iter().rev() {
        segment.extend(next);
        host.write(place, segment.as_bytes());
        let len = 16 * segment.len() as u32;
        next = Some(match next {
            None => SglDescriptor::last_segment(place.0, len),
            Some(_) => SglDescriptor::segment(place.0, len),
        });
        place = place.offset(u64::from(len) + 8);
    }
    next.unwrap()
}
