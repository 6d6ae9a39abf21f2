//! Reads, writes and related commands: effects and rejected arguments.

use nvme_spec::nvm::{DatasetManagement, DatasetRange};

use super::*;

#[test]
fn bytes_go_out_and_come_back() {
    let mut host = Host::plain();
    let buffer = host.alloc(4 * PAGE);
    let data = pattern(PAGE, 1);
    host.write(at(&buffer), &data);
    let write = nvm(NvmOpcode::WRITE, 16, 8).with_prps(at(&buffer).0, 0);
    assert_eq!(host.io(write), Status::SUCCESS);
    assert_eq!(host.stored(16 * 512, PAGE), data);
    let back = at(&buffer).offset(2 * PAGE as u64);
    let read = nvm(NvmOpcode::READ, 16, 8).with_prps(back.0, 0);
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_eq!(host.read(back, PAGE), data);
    let counters = host.controller.counters();
    assert_eq!((counters.reads, counters.writes), (1, 1));
    assert_eq!((counters.bytes_read, counters.bytes_written), (PAGE as u64, PAGE as u64));
}

#[test]
fn prps_cross_pages_and_lists() {
    let mut host = Host::plain();
    let buffer = host.alloc(64 * PAGE);
    let list = host.alloc(2 * PAGE);
    let data = pattern(40 * PAGE, 3);
    host.media.poke(0, &data).unwrap();
    // Starts inside a page; the list starts near the end of its page and continues in the next.
    let start = at(&buffer).offset(512);
    let mut entries: Vec<u64> = (1..=40).map(|page| at(&buffer).0 + page * 4096).collect();
    let first = PAGE - 5 * 8;
    let rest = entries.split_off(4);
    entries.push(at(&list).0 + PAGE as u64);
    host.write(at(&list).offset(first as u64), entries.as_bytes());
    host.write(at(&list).offset(PAGE as u64), rest.as_bytes());
    let prp2 = at(&list).0 + first as u64;
    let read = nvm(NvmOpcode::READ, 0, 40 * 8).with_prps(start.0, prp2);
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_eq!(host.read(start, data.len()), data);
}

#[test]
fn prps_have_to_be_aligned() {
    let mut host = Host::plain();
    let buffer = host.alloc(16 * PAGE);
    let base = at(&buffer).0;
    let cases = [
        // (blocks, prp1, prp2)
        (8, base + 2, 0),
        (16, base, base + 4096 + 512),
        (16, base + 512, base + 4096 + 4),
        (24, base, base + 4),
        (24, base, base + 4096),
    ];
    // The list of the last case: a page with an offset.
    let entries = [base + 8192, base + 12288 + 8];
    host.write(at(&buffer).offset(4096), entries.as_bytes());
    for (lbas, prp1, prp2) in cases {
        let read = nvm(NvmOpcode::READ, 0, lbas).with_prps(prp1, prp2);
        assert_eq!(host.io(read), Status::INVALID_PRP_OFFSET, "{lbas} {prp1:x} {prp2:x}");
    }
    let read = nvm(NvmOpcode::READ, 0, 15).with_prps(base + 512, base + 4096);
    assert_eq!(host.io(read), Status::SUCCESS, "the second page may be used in part");
}

#[test]
fn unmapped_memory_is_a_transfer_error() {
    let mut host = Host::plain();
    let buffer = host.alloc(PAGE);
    for (prp1, prp2, lbas) in [
        (0x10_0000, 0, 8),
        (!0xfff, 0, 8),
        (at(&buffer).0, 0x5000, 16),
        (at(&buffer).0, 0x5000, 24),
    ] {
        for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
            let status = host.run(1, nvm(opcode, 0, lbas).with_prps(prp1, prp2)).status();
            assert_eq!(status.code(), Status::DATA_TRANSFER_ERROR);
            assert!(!status.dnr());
        }
    }
    assert_eq!(host.controller.counters().refused_dma, 8);
    let freed = at(&buffer).0;
    drop(buffer);
    let read = nvm(NvmOpcode::READ, 0, 8).with_prps(freed, 0);
    assert_eq!(host.io(read), Status::DATA_TRANSFER_ERROR);
}

#[test]
fn ranges_and_namespaces_are_checked() {
    let mut host = Host::plain();
    let buffer = host.alloc(PAGE);
    let total = 2048;
    let with = |sqe: Sqe| sqe.with_prps(at(&buffer).0, 0);
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::WRITE_ZEROES] {
        assert_eq!(host.io(with(nvm(opcode, total - 8, 8))), Status::SUCCESS);
        for lba in [total - 7, total, u64::MAX - 7, u64::MAX, 1 << 55] {
            assert_eq!(host.io(with(nvm(opcode, lba, 8))), Status::LBA_OUT_OF_RANGE, "{lba}");
        }
        for nsid in [0, 2, u32::MAX] {
            let sqe = Sqe { nsid, ..with(nvm(opcode, 0, 8)) };
            assert_eq!(host.io(sqe), Status::INVALID_NAMESPACE, "{nsid}");
        }
        let fused = Sqe { flags: 1, ..with(nvm(opcode, 0, 8)) };
        assert_eq!(host.io(fused), Status::INVALID_FIELD);
    }
    for opcode in [NvmOpcode::COMPARE, NvmOpcode::VERIFY, NvmOpcode(0x7f), NvmOpcode(0xc0)] {
        let status = host.run(1, with(nvm(opcode, 0, 8))).status();
        assert_eq!(status.code(), Status::INVALID_OPCODE);
        assert!(status.dnr() && status.more());
    }
}

#[test]
fn transfers_are_limited() {
    let mut host = Host::ready(|config| EmuConfig { mdts_bytes: Some(8192), ..config });
    let buffer = host.alloc(4 * PAGE);
    let prps = (at(&buffer).0, at(&buffer).0 + 4096);
    let fits = nvm(NvmOpcode::READ, 0, 16).with_prps(prps.0, prps.1);
    assert_eq!(host.io(fits), Status::SUCCESS);
    let too_long = nvm(NvmOpcode::READ, 0, 17).with_prps(prps.0, prps.1);
    assert_eq!(host.io(too_long), Status::INVALID_FIELD);
    // Write Zeroes transfers no data, so the limit does not apply.
    assert_eq!(host.io(nvm(NvmOpcode::WRITE_ZEROES, 0, 2048)), Status::SUCCESS);
}

#[test]
fn zeroes_and_deallocation_read_as_zeroes() {
    let mut host = Host::plain();
    host.media.poke(0, &pattern(1 << 20, 9)).unwrap();
    assert_eq!(host.io(nvm(NvmOpcode::WRITE_ZEROES, 1, 3)), Status::SUCCESS);
    assert_eq!(host.stored(512, 3 * 512), vec![0; 3 * 512]);
    assert_ne!(host.stored(0, 512), vec![0; 512]);
    let list = host.alloc(PAGE);
    let range = |slba, lbas| DatasetRange { attributes: 0, lbas, slba };
    let mut manage = |ranges: &[DatasetRange], deallocate| {
        host.write(at(&list), ranges.as_bytes());
        let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0, Cid(0), Nsid(1));
        DatasetManagement { nr_z: ranges.len() as u8 - 1, deallocate }.write_to(&mut sqe);
        let status = host.io(sqe.with_prps(at(&list).0, 0));
        (status, host.stored(100 * 512, 512) == vec![0; 512])
    };
    let out = [range(100, 1), range(2047, 2)];
    assert_eq!(manage(&out, true), (Status::LBA_OUT_OF_RANGE, false), "nothing was done");
    assert_eq!(manage(&[range(100, 1)], false), (Status::SUCCESS, false), "only a hint");
    let fine = [range(300, 0), range(100, 1), range(2047, 1)];
    assert_eq!(manage(&fine, true), (Status::SUCCESS, true));
    assert_eq!(host.stored(2047 * 512, 512), vec![0; 512]);
    assert_ne!(host.stored(99 * 512, 512), vec![0; 512]);
}

#[test]
fn flush_is_for_one_namespace_or_all() {
    let mut host = Host::plain();
    for (nsid, status) in [
        (1, Status::SUCCESS),
        (u32::MAX, Status::SUCCESS),
        (0, Status::INVALID_NAMESPACE),
        (2, Status::INVALID_NAMESPACE),
    ] {
        let sqe = Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(nsid));
        assert_eq!(host.io(sqe), status, "{nsid}");
    }
    assert_eq!(host.controller.counters().flushes, 2);
}

#[test]
fn namespaces_are_apart() {
    let (other, seen) = (media(1 << 20), pattern(PAGE, 5));
    let mut host = Host::ready(|config| config.namespace(other.clone(), 4096));
    let buffer = host.alloc(PAGE);
    host.write(at(&buffer), &seen);
    let write = Sqe { nsid: 2, ..nvm(NvmOpcode::WRITE, 3, 1) }.with_prps(at(&buffer).0, 0);
    assert_eq!(host.io(write), Status::SUCCESS);
    let mut bytes = vec![0; PAGE];
    other.peek(3 * 4096, &mut bytes).unwrap();
    assert_eq!(bytes, seen);
    assert_eq!(host.stored(0, 1 << 20), vec![0; 1 << 20]);
    let past = Sqe { nsid: 2, ..nvm(NvmOpcode::WRITE, 256, 1) }.with_prps(at(&buffer).0, 0);
    assert_eq!(host.io(past), Status::LBA_OUT_OF_RANGE);
}

#[test]
fn larger_memory_pages_work() {
    let mut host = Host::off(|config| config);
    let queue = host.host_queue(8, 8);
    host.set(reg::AQA, 0x0007_0007);
    host.set64(reg::ASQ, at(&queue.sq).0);
    host.set64(reg::ACQ, at(&queue.cq).0);
    host.queues[0] = Some(queue);
    host.set(reg::CC, Host::good_cc().with_mps(4).0);
    assert_eq!(host.csts().rdy(), 1);
    host.create_pair(1, 8, 8);
    let buffer = host.alloc(1 << 18);
    host.media.poke(0, &pattern(1 << 17, 2)).unwrap();
    let read = nvm(NvmOpcode::READ, 0, 256).with_prps(at(&buffer).0, at(&buffer).0 + (1 << 16));
    assert_eq!(host.io(read), Status::SUCCESS);
    assert_eq!(host.read(at(&buffer), 1 << 17), pattern(1 << 17, 2));
}
