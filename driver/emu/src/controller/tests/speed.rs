//! Cost of the I/O path. Counts are asserted, times only printed: `cargo test --release -p nvme-emu
//! speed -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use nvme_spec::sgl::SglDescriptor;

use super::*;
use crate::{
    domain::SgList,
    media::{DataFault, Media, MediaKind, MediaOp},
};

#[test]
#[ignore = "prints times, and asserts little"]
#[allow(clippy::print_stdout, reason = "times are what it is run for")]
fn speed_of_small_and_large_commands() {
    const DEPTH: u32 = 256;
    const MEDIUM: u64 = 1 << 28;
    let bytes = media(MEDIUM);
    let mut host = Host::enabled(|mut config| {
        config.namespaces.clear();
        EmuConfig { mqes: 1024, ..config }.namespace(bytes.clone(), 4096)
    });
    host.create_pair(1, DEPTH, DEPTH);
    let memory = host.alloc(MEDIUM as usize);
    let base = at(&memory).0;
    host.domain.access().fill(Iova(base), 1, MEDIUM as usize).unwrap();
    for chunk in 0..MEDIUM / 4096 {
        bytes.poke(chunk * 4096, &[2; 4096]).unwrap();
    }
    println!("a flush: {:.0} ns", batches(&mut host, 200_000, |_| flush()));
    let read = |place: u64, size: u32, to: u64| {
        let data = SglDescriptor::data_block(base + to, size);
        nvm(NvmOpcode::READ, place / 4096, size / 4096).with_sgl(data)
    };
    let each = batches(&mut host, 200_000, |_| read(0, 4096, 0));
    println!("4 KiB, in cache: {each:.0} ns");
    for size in [4096, 32 << 10, 128 << 10] {
        let count = 200_000.min(4 * MEDIUM / u64::from(size)) as u32;
        let far = |index: u32| {
            let place = u64::from(index) * u64::from(size) % MEDIUM;
            read(place, size, MEDIUM - place - u64::from(size))
        };
        // Best of several alternating runs, because the machine may be busy.
        let (mut each, mut plain) = (f64::MAX, f64::MAX);
        for _ in 0..5 {
            each = each.min(batches(&mut host, count, far));
            plain = plain.min(copies(&host, &mut bytes.clone(), base, u64::from(size), MEDIUM));
        }
        let rate = |each: f64| f64::from(size) / each;
        println!(
            "{size} bytes: {each:.0} ns, {:.2} GB/s; a plain copy {plain:.0} ns, {:.2} GB/s",
            rate(each),
            rate(plain)
        );
    }
    let start = Instant::now();
    for _ in 0..1_000_000 {
        host.step();
    }
    println!("an idle step: {:.0} ns", start.elapsed().as_nanos() as f64 / 1e6);
}

fn flush() -> Sqe {
    Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(1))
}

/// Measures nanoseconds per command of the controller over `count` commands, 64 at a time.
fn batches(host: &mut Host, count: u32, command: impl Fn(u32) -> Sqe) -> f64 {
    let mut spent = Duration::ZERO;
    for first in (0..count).step_by(64) {
        for index in first..first + 64 {
            host.post(1, command(index));
        }
        host.ring_sq(1);
        let start = Instant::now();
        host.step();
        spent += start.elapsed();
        assert_eq!(host.reap_all(1).len(), 64);
    }
    spent.as_nanos() as f64 / f64::from(count.next_multiple_of(64))
}

/// Measures nanoseconds per copy for the same copies without a controller.
fn copies(host: &Host, media: &mut MemoryMedia, base: u64, size: u64, medium: u64) -> f64 {
    let access = host.domain.access();
    let mut sg_list = SgList::new();
    let start = Instant::now();
    for place in (0..medium).step_by(size as usize) {
        sg_list.clear();
        access.push(&mut sg_list, Iova(base + medium - place - size), size as usize).unwrap();
        let op = MediaOp {
            token: 0,
            kind: MediaKind::Read,
            offset: place,
            len: size,
            sg_list,
            placement: 0,
            fault: DataFault::None,
        };
        sg_list = media.submit(op, Nanos(0)).unwrap().sg_list;
    }
    start.elapsed().as_nanos() as f64 / (medium / size) as f64
}
