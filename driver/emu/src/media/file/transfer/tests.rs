use std::sync::Arc;

use nvme_driver::{DmaMemory, DmaSpace};
use proptest::prelude::*;

use super::*;
use crate::{domain::EmuDomain, media::DataFault};

const LIMITS: Limits = Limits { memory_align: 4, offset_align: 512 };

fn memory() -> (Arc<EmuDomain>, Arc<dyn DmaMemory>) {
    let domain = EmuDomain::new("test");
    let memory = domain.alloc(1 << 20).unwrap();
    (domain, memory)
}

/// Creates an operation on parts of `memory`, given as (offset, length).
fn op(kind: MediaKind, parts: &[(u64, usize)]) -> MediaOp {
    let (domain, memory) = memory();
    let mut sg_list = SgList::new();
    for (offset, len) in parts {
        let iova = memory.segments()[0].iova.offset(*offset);
        domain.access().push(&mut sg_list, iova, *len).unwrap();
    }
    let len = sg_list.bytes();
    let fault = DataFault::None;
    MediaOp { token: 0, kind, offset: 0, len, sg_list, placement: 0, fault }
}

fn straight(op: &MediaOp, bounce: bool) -> (bool, usize) {
    let drain = HostMap::anonymous(4096).unwrap();
    let mut transfer = Transfer::default();
    transfer.prepare(op, LIMITS, &drain, &mut Buffers::default(), bounce).unwrap();
    (transfer.is_straight(), transfer.parts.len())
}

#[test]
fn only_what_the_kernel_cannot_address_is_bounced() {
    let (read, write) = (MediaKind::Read, MediaKind::Write { fua: false });
    assert_eq!(straight(&op(read, &[(0, 512), (4096, 1024)]), false), (true, 2));
    assert_eq!(straight(&op(read, &[(4, 512), (4096, 1024)]), false), (true, 2));
    assert_eq!(straight(&op(read, &[(2, 512)]), false), (false, 1), "address");
    assert_eq!(straight(&op(read, &[(0, 100), (512, 412)]), false), (false, 1), "length");
    assert_eq!(straight(&op(read, &[(0, 512)]), true), (false, 1), "asked for");
    let many: Vec<_> = (0..1025).map(|part| (part * 1020, 512)).collect();
    assert_eq!(straight(&op(read, &many[..1024]), false), (true, 1024));
    assert_eq!(straight(&op(read, &many), false), (false, 1), "too many parts");
    let holes = |kind| {
        let mut op = op(kind, &[(0, 512)]);
        op.sg_list.push_hole(8192);
        op.len = op.sg_list.bytes();
        op
    };
    assert_eq!(straight(&holes(read), false), (true, 3), "two drains of 4096 bytes");
    assert_eq!(straight(&holes(write), false), (false, 1), "a hole is written as zeroes");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// For any split of a transfer by the kernel, the rest is what has not moved yet.
    #[test]
    fn the_rest_starts_where_the_kernel_stopped(
        lens in proptest::collection::vec(1usize..6, 1..6),
        cuts in proptest::collection::vec(0usize..3000, 0..12),
    ) {
        let place = |(index, blocks): (usize, &usize)| (16_384 * index as u64, blocks * 512);
        let parts: Vec<_> = lens.iter().enumerate().map(place).collect();
        let op = op(MediaKind::Read, &parts);
        let drain = HostMap::anonymous(4096).unwrap();
        let mut transfer = Transfer::default();
        transfer.prepare(&op, LIMITS, &drain, &mut Buffers::default(), false).unwrap();
        // The address of every byte, in order.
        let every = |parts: &[libc::iovec]| -> Vec<usize> {
            let bytes = |part: &libc::iovec| {
                let base = part.iov_base.addr();
                base..base + part.iov_len
            };
            parts.iter().flat_map(bytes).collect()
        };
        let all = every(&transfer.parts);
        let mut moved = 0;
        for cut in cuts {
            let step = cut.min(all.len() - moved);
            moved += step;
            prop_assert_eq!(transfer.advance(step), moved == all.len());
            let (left, offset) = transfer.rest_of(1000);
            prop_assert_eq!(offset, 1000 + moved as u64);
            prop_assert_eq!(every(left), &all[moved..]);
            if moved == all.len() {
                break;
            }
        }
    }
}
