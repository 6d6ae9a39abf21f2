//! The I/O path does not allocate after its warm-up.

use nvme_spec::sgl::SglDescriptor;

use super::*;
use crate::media::{Latency, SimMedia, SimOptions};

/// Runs reads with lists, writes with PRPs, a flush and an error; returns the steps' allocations.
fn round(host: &mut Host, buffer: Iova, list: SglDescriptor) -> u64 {
    for lba in 0..4 {
        host.post(1, nvm(NvmOpcode::READ, lba * 64, 64).with_sgl(list));
        host.post(1, nvm(NvmOpcode::WRITE, lba, 8).with_prps(buffer.0, 0));
    }
    host.post(1, Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(1)));
    host.post(1, nvm(NvmOpcode::READ, 1 << 40, 8).with_prps(buffer.0, 0));
    host.ring_sq(1);
    let allocated = allocation_counter::measure(|| {
        host.step();
        host.now = host.now + Nanos(1000);
        host.step();
    });
    assert_eq!(host.reap_all(1).len(), 10);
    allocated.count_total
}

fn warmed_up(host: &mut Host) -> [u64; 3] {
    let (buffer, page) = (host.alloc(16 * PAGE), host.alloc(PAGE));
    let parts: Vec<_> = (0..8)
        .map(|part| SglDescriptor::data_block(at(&buffer).0 + 8192 * (7 - part), 4096))
        .collect();
    host.write(at(&page), parts.as_bytes());
    let list = SglDescriptor::last_segment(at(&page).0, 128);
    (0..200).for_each(|_| {
        round(host, at(&buffer), list);
    });
    [(); 3].map(|()| round(host, at(&buffer), list))
}

#[test]
fn steps_do_not_allocate() {
    assert_eq!(warmed_up(&mut Host::plain()), [0; 3], "media that finish at once");
}

#[test]
fn pieces_are_used_again_and_do_not_pile_up() {
    let latency = Latency { min_ns: 1000, mean_ns: 1000, tail_ns: 1000, tail_ppm: 0 };
    let options = SimOptions {
        read: latency,
        write: latency,
        flush: latency,
        volatile_cache: false,
        ..SimOptions::default()
    };
    let mut host = Host::ready(|mut config| {
        config.namespaces.clear();
        config.namespace(SimMedia::new(media(1 << 20), options), 512)
    });
    warmed_up(&mut host);
    // As many as were in flight at the same time.
    let spare = host.controller.storage.spare.len();
    assert!(spare <= 9, "{spare}");
}
