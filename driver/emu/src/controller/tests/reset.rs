//! Resets with operations in flight on slow media.

use super::*;
use crate::media::{Latency, SimMedia, SimOptions};

fn fixed(ns: u64) -> Latency {
    Latency { min_ns: ns, mean_ns: ns, tail_ns: ns, tail_ppm: 0 }
}

/// Creates a host on a medium that takes 1000 ns for everything.
fn slow(bytes: &MemoryMedia, seed: u64) -> Host {
    let (read, write, flush) = (fixed(1000), fixed(1000), fixed(1000));
    let options = SimOptions { seed, read, write, flush, lba_bytes: 512, ..SimOptions::default() };
    let medium = SimMedia::new(bytes.clone(), options);
    Host::ready(|mut config| {
        config.namespaces.clear();
        config.namespace(medium, 512)
    })
}

#[test]
fn no_dma_happens_after_a_reset() {
    let bytes = media(1 << 20);
    bytes.poke(0, &pattern(PAGE, 1)).unwrap();
    for cut in ["reset", "power", "unplug"] {
        let mut host = slow(&bytes, 1);
        let buffer = host.alloc(PAGE);
        for _ in 0..10 {
            host.post(1, nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0));
        }
        host.ring_sq(1);
        assert_eq!(host.step().outstanding, 10);
        let cq = host.queues[1].as_ref().unwrap().cq.clone();
        match cut {
            "reset" => host.disable(),
            "power" => host.controller.power_loss(host.now),
            _ => host.controller.unplug(),
        }
        // Data that the host writes there now stays.
        host.write(at(&buffer), &[0x77; PAGE]);
        host.now = Nanos(10_000);
        let progress = host.step();
        assert_eq!((progress.outstanding, progress.next_event), (0, None), "{cut}");
        assert_eq!(host.read(at(&buffer), PAGE), [0x77; PAGE], "{cut}");
        assert_eq!(host.read(at(&cq), 256), [0; 256], "{cut}: no completions");
    }
}

#[test]
fn commands_work_again_after_a_reset_with_the_same_identifiers() {
    let bytes = media(1 << 20);
    let mut host = slow(&bytes, 1);
    let buffer = host.alloc(PAGE);
    for round in 0..20 {
        let count = round % 5;
        for index in 0..count {
            let sqe = nvm(NvmOpcode::READ, 0, 8).with_prps(at(&buffer).0, 0);
            host.post_as(1, Sqe { cid: index, ..sqe });
        }
        host.ring_sq(1);
        host.step();
        if round % 3 == 0 {
            host.disable();
            host.enable(8, 8);
            host.create_pair(1, 16, 16);
            continue;
        }
        host.now = host.now + Nanos(1000);
        host.step();
        let mut done: Vec<u16> = host.reap_all(1).iter().map(|cqe| cqe.cid).collect();
        done.sort_unstable();
        assert_eq!(done, (0..count).collect::<Vec<_>>(), "round {round}");
    }
}

#[test]
fn shutdown_waits_for_media_and_flushes() {
    let bytes = media(1 << 20);
    for seed in 0..16 {
        bytes.poke(0, &[0; 512]).unwrap();
        let mut host = slow(&bytes, seed);
        let buffer = host.alloc(PAGE);
        host.write(at(&buffer), &[9; 512]);
        host.send(1, nvm(NvmOpcode::WRITE, 0, 1).with_prps(at(&buffer).0, 0));
        host.set(reg::CC, Host::good_cc().with_shn(1).0);
        let mut steps = 0;
        while host.csts().shst() != 2 {
            let progress = host.step();
            host.now = host.now + Nanos(100);
            steps += 1;
            assert!(steps < 100);
            assert!(progress.listening || host.csts().shst() == 2, "a driver of it must not sleep");
            if steps < 10 {
                assert_eq!(host.csts().shst(), 1, "the write and the flush take longer");
            }
        }
        assert_eq!(host.reap_all(1).len(), 1, "what was fetched completes");
        host.controller.power_loss(host.now);
        let mut block = [0; 512];
        bytes.peek(0, &mut block).unwrap();
        assert_eq!(block, [9; 512], "seed {seed}");
    }
}

/// Writes a block with the given options, then cuts the power. Returns whether it survived.
fn survives(seed: u64, fua: bool, flush: bool, cache: bool) -> bool {
    let bytes = media(1 << 20);
    let mut host = slow(&bytes, seed);
    let later = |host: &mut Host, sqe: Sqe, qid: u16| {
        host.send(qid, sqe);
        host.now = host.now + Nanos(1000);
        host.step();
        assert_eq!(host.reap_all(qid)[0].status(), Status::SUCCESS);
    };
    if !cache {
        let sqe = command(AdminOpcode::SET_FEATURES, 0);
        later(&mut host, Sqe { cdw10: 6, cdw11: 0, ..sqe }, 0);
    }
    let buffer = host.alloc(PAGE);
    host.write(at(&buffer), &[9; 512]);
    let mut write = nvm(NvmOpcode::WRITE, 0, 1).with_prps(at(&buffer).0, 0);
    write.cdw12 |= u32::from(fua) << 30;
    later(&mut host, write, 1);
    if flush {
        later(&mut host, Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(u32::MAX)), 1);
    }
    host.controller.power_loss(host.now);
    let mut block = [0; 512];
    bytes.peek(0, &mut block).unwrap();
    block == [9; 512]
}

#[test]
fn writes_are_as_permanent_as_they_were_asked_to_be() {
    let count =
        |fua, flush, cache| (0..32).filter(|seed| survives(*seed, fua, flush, cache)).count();
    assert_eq!(count(true, false, true), 32, "force unit access");
    assert_eq!(count(false, true, true), 32, "flush");
    assert_eq!(count(false, false, false), 32, "write cache turned off");
    let kept = count(false, false, true);
    assert!((1..32).contains(&kept), "{kept} of 32 seeds kept what was only cached");
}
