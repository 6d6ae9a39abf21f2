//! I/O commands and their ranges, in both namespaces.

use anyhow::bail;
use nvme_driver::platform::buffer::Buffer;
use nvme_spec::{
    ids::{Cid, Lba, Lbas, Nsid},
    nvm::{BlockRange, DatasetManagement, DatasetRange, NvmOpcode},
    sqe::{Psdt, Sqe},
    status::Status,
};
use zerocopy::IntoBytes;

use super::{Case, Found, status, works};
use crate::{pattern, raw::Raw, target::Namespace};

const PAGE: usize = 4096;
/// An I/O opcode that no controller has.
const NO_OPCODE: u8 = 0x7f;

pub(super) const CASES: &[Case] = &[
    works("write and read back, first namespace", |raw| round_trip(raw, 0, 0)),
    works("write and read back, second namespace", |raw| round_trip(raw, 1, 0)),
    works("write and read back, the last blocks", |raw| {
        let ns = raw.target.namespaces[0];
        round_trip(raw, 0, ns.lbas - PAGE as u64 / u64::from(ns.lba_bytes))
    }),
    works("write and read back, the last block of the second namespace", |raw| {
        let last = raw.target.namespaces[1].lbas - 1;
        round_trip(raw, 1, last)
    }),
    works("namespaces do not share their blocks", |raw| {
        let (first, second) = (raw.target.namespaces[0], raw.target.namespaces[1]);
        let memory = raw.alloc(PAGE)?;
        let at = memory.iova().0;
        fill(&memory, 0, &pattern(PAGE, 1))?;
        expect_ok(raw, &write(&second, 0, 1).with_prps(at, 0))?;
        fill(&memory, 0, &pattern(PAGE, 2))?;
        expect_ok(raw, &write(&first, 0, 8).with_prps(at, 0))?;
        expect_ok(raw, &read(&second, 0, 1).with_prps(at, 0))?;
        Ok(Found::wrong_unless(bytes(&memory, 0, PAGE)? == pattern(PAGE, 1), "wrong data"))
    }),
    works("write with FUA", |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        let mut sqe = write(&ns, 0, 8).with_prps(memory.iova().0, 0);
        change(&mut sqe, |range| range.fua = true);
        raw.io(&sqe)
    }),
    works("read with FUA and limited retry", |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        let mut sqe = read(&ns, 0, 8).with_prps(memory.iova().0, 0);
        change(&mut sqe, |range| (range.fua, range.lr) = (true, true));
        raw.io(&sqe)
    }),
    works("flush one namespace", |raw| raw.io(&flush(1))),
    works("flush all namespaces", |raw| raw.io(&flush(Nsid::ALL.0))),
    status("flush a namespace that does not exist", Status::INVALID_NAMESPACE, |raw| {
        raw.io(&flush(0x1234))
    }),
    status("opcode that does not exist", Status::INVALID_OPCODE, |raw| {
        raw.io(&Sqe::new(NO_OPCODE, Cid(0), Nsid(1)))
    }),
    status("read of namespace 0", Status::INVALID_NAMESPACE, |raw| read_of(raw, 0)),
    status("read of a namespace that does not exist", Status::INVALID_NAMESPACE, |raw| {
        read_of(raw, 0x1234)
    }),
    status("read of all namespaces", Status::INVALID_NAMESPACE, |raw| read_of(raw, Nsid::ALL.0)),
    status("read one past the end", Status::LBA_OUT_OF_RANGE, |raw| {
        out_of_range(raw, 0, |ns| read(ns, ns.lbas, 1))
    }),
    status("read across the end", Status::LBA_OUT_OF_RANGE, |raw| {
        out_of_range(raw, 0, |ns| read(ns, ns.lbas - 1, 2))
    }),
    status("read at the end of all addresses", Status::LBA_OUT_OF_RANGE, |raw| {
        out_of_range(raw, 0, |ns| read(ns, u64::MAX, 2))
    }),
    status("write one past the end", Status::LBA_OUT_OF_RANGE, |raw| {
        out_of_range(raw, 0, |ns| write(ns, ns.lbas, 1))
    }),
    status("write across the end of the second namespace", Status::LBA_OUT_OF_RANGE, |raw| {
        out_of_range(raw, 1, |ns| write(ns, ns.lbas - 1, 2))
    }),
    status("write zeroes past the end", Status::LBA_OUT_OF_RANGE, |raw| {
        out_of_range(raw, 0, |ns| block(NvmOpcode::WRITE_ZEROES, ns, ns.lbas, 1))
    }),
    status("deallocate past the end", Status::LBA_OUT_OF_RANGE, |raw| {
        let last = raw.target.namespaces[0].lbas - 1;
        deallocate(raw, &[(0, 8), (last, 2)])
    }),
    status("read of more than MDTS", Status::INVALID_FIELD, |raw| over_mdts(raw, NvmOpcode::READ)),
    status("write of more than MDTS", Status::INVALID_FIELD, |raw| {
        over_mdts(raw, NvmOpcode::WRITE)
    }),
    status("first half of a fused command", Status::INVALID_FIELD, |raw| {
        let memory = raw.alloc(PAGE)?;
        let mut sqe = read(&raw.target.namespaces[0], 0, 8).with_prps(memory.iova().0, 0);
        sqe.flags |= 1;
        raw.io(&sqe)
    }),
    status("reserved data pointer type", Status::INVALID_FIELD, |raw| {
        let memory = raw.alloc(PAGE)?;
        let sqe = read(&raw.target.namespaces[0], 0, 8).with_prps(memory.iova().0, 0);
        raw.io(&sqe.with_psdt(Psdt(3)))
    }),
    works("write zeroes", |raw| zeroes(raw, |ns| block(NvmOpcode::WRITE_ZEROES, ns, 1, 6))),
    works("write zeroes with deallocate", |raw| {
        zeroes(raw, |ns| {
            let mut sqe = block(NvmOpcode::WRITE_ZEROES, ns, 1, 6);
            change(&mut sqe, |range| range.deac = true);
            sqe
        })
    }),
    works("deallocate one range", |raw| deallocate(raw, &[(0, 8)])),
    works("deallocate 256 ranges", |raw| {
        let ranges: Vec<_> = (0..256).map(|index| (index * 16, 8)).collect();
        deallocate(raw, &ranges)
    }),
    works("a range of no blocks", |raw| deallocate(raw, &[(5, 0)])),
    works("deallocated blocks read the same twice", |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        fill(&memory, 0, &pattern(PAGE, 3))?;
        let at = memory.iova().0;
        expect_ok(raw, &write(&ns, 0, 8).with_prps(at, 0))?;
        if deallocate(raw, &[(0, 8)])? != Found::OK {
            bail!("deallocate failed");
        }
        let mut seen = Vec::new();
        for _ in 0..2 {
            expect_ok(raw, &read(&ns, 0, 8).with_prps(at, 0))?;
            seen.push(bytes(&memory, 0, PAGE)?);
        }
        Ok(Found::wrong_unless(seen[0] == seen[1], "different bytes"))
    }),
    works("the neighbours of deallocated blocks stay", |raw| {
        let ns = raw.target.namespaces[0];
        let memory = raw.alloc(PAGE)?;
        let (at, data) = (memory.iova().0, pattern(PAGE, 4));
        fill(&memory, 0, &data)?;
        expect_ok(raw, &write(&ns, 0, 8).with_prps(at, 0))?;
        if deallocate(raw, &[(1, 6)])? != Found::OK {
            bail!("deallocate failed");
        }
        expect_ok(raw, &read(&ns, 0, 8).with_prps(at, 0))?;
        let found = bytes(&memory, 0, PAGE)?;
        let stays = found[..512] == data[..512] && found[3584..] == data[3584..];
        Ok(Found::wrong_unless(stays, "neighbours are lost"))
    }),
];

/// Makes a command for `lbas` blocks from `lba` on.
pub(super) fn block(opcode: NvmOpcode, ns: &Namespace, lba: u64, lbas: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0, Cid(0), Nsid(ns.nsid));
    let range = BlockRange::new(Lba(lba), Lbas(lbas)).expect("1 to 65536 blocks");
    range.write_to(&mut sqe);
    sqe
}

pub(super) fn read(ns: &Namespace, lba: u64, lbas: u32) -> Sqe {
    block(NvmOpcode::READ, ns, lba, lbas)
}

pub(super) fn write(ns: &Namespace, lba: u64, lbas: u32) -> Sqe {
    block(NvmOpcode::WRITE, ns, lba, lbas)
}

pub(super) fn flush(nsid: u32) -> Sqe {
    Sqe::new(NvmOpcode::FLUSH.0, Cid(0), Nsid(nsid))
}

fn change(sqe: &mut Sqe, how: impl FnOnce(&mut BlockRange)) {
    let mut range = BlockRange::from_sqe(sqe);
    how(&mut range);
    range.write_to(sqe);
}

/// Sends an I/O command that must succeed for the case to have a meaning.
pub(super) fn expect_ok(raw: &mut Raw<'_>, sqe: &Sqe) -> anyhow::Result<()> {
    match raw.io(sqe)? {
        Found::OK => Ok(()),
        found => bail!("I/O opcode {:#04x} ended with {found}", sqe.opcode),
    }
}

pub(super) fn fill(memory: &Buffer, offset: usize, data: &[u8]) -> anyhow::Result<()> {
    Ok(memory.clone().write(offset, data)?)
}

pub(super) fn bytes(memory: &Buffer, offset: usize, len: usize) -> anyhow::Result<Vec<u8>> {
    let mut data = vec![0; len];
    memory.read(offset, &mut data)?;
    Ok(data)
}

/// Writes one page (or one block) at `lba` and reads it back into different memory.
fn round_trip(raw: &mut Raw<'_>, namespace: usize, lba: u64) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[namespace];
    let (from, to) = (raw.alloc(PAGE)?, raw.alloc(PAGE)?);
    let (lbas, data) = (PAGE as u32 / ns.lba_bytes, pattern(PAGE, lba));
    fill(&from, 0, &data)?;
    expect_ok(raw, &write(&ns, lba, lbas).with_prps(from.iova().0, 0))?;
    expect_ok(raw, &read(&ns, lba, lbas).with_prps(to.iova().0, 0))?;
    Ok(Found::wrong_unless(bytes(&to, 0, PAGE)? == data, "wrong data"))
}

fn read_of(raw: &mut Raw<'_>, nsid: u32) -> anyhow::Result<Found> {
    let ns = Namespace { nsid, ..raw.target.namespaces[0] };
    let memory = raw.alloc(PAGE)?;
    raw.io(&read(&ns, 0, 8).with_prps(memory.iova().0, 0))
}

fn out_of_range(
    raw: &mut Raw<'_>,
    namespace: usize,
    make: fn(&Namespace) -> Sqe,
) -> anyhow::Result<Found> {
    let memory = raw.alloc(2 * PAGE)?;
    let at = memory.iova().0;
    let sqe = make(&raw.target.namespaces[namespace]);
    raw.io(&sqe.with_prps(at, at + PAGE as u64))
}

/// Sends a command for one block more than MDTS allows, with enough memory for it.
fn over_mdts(raw: &mut Raw<'_>, opcode: NvmOpcode) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[0];
    let pages = raw.target.mdts_bytes as usize / PAGE + 1;
    let (memory, list) = (raw.alloc(pages * PAGE)?, raw.alloc(PAGE)?);
    for page in 1..pages {
        let entry = memory.iova().0 + (page * PAGE) as u64;
        fill(&list, (page - 1) * 8, &entry.to_le_bytes())?;
    }
    let sqe = block(opcode, &ns, 0, raw.target.mdts_bytes / ns.lba_bytes + 1);
    raw.io(&sqe.with_prps(memory.iova().0, list.iova().0))
}

/// Writes eight blocks, sends the command from `make`, and checks that blocks 1 to 6 are zero.
fn zeroes(raw: &mut Raw<'_>, make: fn(&Namespace) -> Sqe) -> anyhow::Result<Found> {
    let ns = raw.target.namespaces[0];
    let memory = raw.alloc(PAGE)?;
    let (at, data) = (memory.iova().0, pattern(PAGE, 5));
    fill(&memory, 0, &data)?;
    expect_ok(raw, &write(&ns, 0, 8).with_prps(at, 0))?;
    expect_ok(raw, &make(&ns))?;
    expect_ok(raw, &read(&ns, 0, 8).with_prps(at, 0))?;
    let found = bytes(&memory, 0, PAGE)?;
    let mut wanted = data;
    wanted[512..3584].fill(0);
    Ok(Found::wrong_unless(found == wanted, "wrong data"))
}

fn deallocate(raw: &mut Raw<'_>, ranges: &[(u64, u32)]) -> anyhow::Result<Found> {
    let memory = raw.alloc(PAGE)?;
    for (index, &(slba, lbas)) in ranges.iter().enumerate() {
        let range = DatasetRange { attributes: 0, lbas, slba };
        fill(&memory, index * 16, range.as_bytes())?;
    }
    let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0, Cid(0), Nsid(1));
    let command = DatasetManagement { nr_z: (ranges.len() - 1) as u8, deallocate: true };
    command.write_to(&mut sqe);
    raw.io(&sqe.with_prps(memory.iova().0, 0))
}
