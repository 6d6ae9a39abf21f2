//! Data in all forms: copied, in pages, in blocks at odd addresses, in chained segments.

use anyhow::{Context, Result, ensure};
use nvme_driver::{
    Controller, ControllerOptions, DescriptorMode, DescriptorPreference, DmaSlice, Error, LbaRange,
    WaitMode,
};
use nvme_spec::ids::{Lba, Nsid};

use super::dyn_bus;
use crate::drive::{
    FIRST, SECOND, alone, attach, bus, bytes_of, fill, memory, options, pattern, same, space,
};
use crate::hardware::{DRIVE_A, DRIVE_B, FILE_A, FILE_B};
use crate::host::{self, Host};

/// Namespaces of the machine: drive, namespace, and backing file.
const SPACES: [(&str, Nsid, &str); 3] =
    [(DRIVE_A, FIRST, FILE_A), (DRIVE_B, FIRST, FILE_B[0]), (DRIVE_B, SECOND, FILE_B[1])];

fn with(descriptors: DescriptorPreference) -> ControllerOptions {
    ControllerOptions { descriptors, ..options() }
}

/// Through the driver's own buffers, with both descriptor formats and both wait modes.
pub fn copies_of_all_sizes() -> Result<()> {
    let mut host = Host::open()?;
    let mut seed = 100;
    for (bdf, nsid, file) in SPACES {
        for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
            for wait in [WaitMode::Poll, WaitMode::Interrupt] {
                let (_space, mut drive) =
                    alone(bdf, ControllerOptions { wait, ..with(descriptors) })?;
                let lba = drive.namespace(nsid)?.lba_bytes() as usize;
                // One LBA, some, more than a page, and more than one command.
                for lbas in [1, 3, (128 << 10) / lba, (1 << 20) / lba + 1] {
                    seed += 1;
                    let expected = pattern(seed, lbas * lba);
                    let at = Lba(4096 + seed);
                    let what = format!("{bdf} nsid {nsid} {descriptors:?} {wait:?} {lbas} LBAs");
                    drive.write(nsid, at, &expected, lbas == 3).context(what.clone())?;
                    let mut found = vec![0; expected.len()];
                    drive.read(nsid, at, &mut found).context(what.clone())?;
                    same(&what, &found, &expected)?;
                    let outside = host.hash(file, at.0 * lba as u64, expected.len())?;
                    ensure!(outside == host::hash(&expected), "{what}: not in {file}");
                }
                drive.flush(nsid)?;
            }
        }
    }
    Ok(())
}

/// Writes from `parts` and reads into them, and compares with the host and with each other.
fn both_ways(drive: &mut Controller, lba: u64, parts: &[DmaSlice], seed: u64) -> Result<()> {
    let len = parts.iter().map(DmaSlice::len).sum();
    let (out, back) = (pattern(seed, len), pattern(seed + 1, len));
    let mut rest = &out[..];
    for part in parts {
        let (now, later) = rest.split_at(part.len());
        fill(part, now)?;
        rest = later;
    }
    drive.write_dma(FIRST, Lba(lba), parts, false)?;
    let outside = Host::open()?.hash(FILE_A, lba * 512, len)?;
    ensure!(outside == host::hash(&out), "what was gathered is not on the drive");
    drive.write(FIRST, Lba(lba), &back, false)?;
    drive.read_dma(FIRST, Lba(lba), parts)?;
    let mut found = Vec::new();
    for part in parts {
        found.extend(bytes_of(part)?);
    }
    same("what was scattered", &found, &back)
}

/// Scattered parts of a larger memory, which detect writes to the bytes around them.
struct Scattered {
    all: DmaSlice,
    parts: Vec<DmaSlice>,
}

const AROUND: u8 = 0xee;

impl Scattered {
    /// Returns parts of these lengths, `gap` bytes apart, the first at `start`; in reverse order.
    fn new(drive: &Controller, lengths: &[usize], start: usize, gap: usize) -> Result<Self> {
        let total = start + lengths.iter().map(|len| len + gap).sum::<usize>();
        let all = memory(&*dyn_bus(drive), total.next_multiple_of(4096))?;
        fill(&all, &vec![AROUND; all.len()])?;
        let (mut at, mut parts) = (start, Vec::new());
        for &len in lengths {
            parts.push(all.slice(at, len)?);
            at += len + gap;
        }
        parts.reverse();
        Ok(Self { all, parts })
    }

    fn nothing_else_changed(&self) -> Result<()> {
        let bytes = bytes_of(&self.all)?;
        let mut own = vec![false; bytes.len()];
        for part in &self.parts {
            let at = (part.iova().0 - self.all.iova().0) as usize;
            own[at..at + part.len()].fill(true);
        }
        let wrong = (0..bytes.len()).find(|&at| !own[at] && bytes[at] != AROUND);
        ensure!(wrong.is_none(), "byte {wrong:?} beside the parts was written");
        Ok(())
    }
}

/// PRPs: two entries, a list, and a first page that begins in its middle.
pub fn pages_everywhere() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, with(DescriptorPreference::Prp))?;
    ensure!(matches!(drive.info().descriptor_mode, DescriptorMode::Prp { .. }));
    for (pages, seed) in [(1, 200), (2, 202), (3, 204), (128, 206)] {
        let scattered = Scattered::new(&drive, &vec![4096; pages], 4096, 4096)?;
        both_ways(&mut drive, 30_000, &scattered.parts, seed)
            .with_context(|| format!("{pages} pages"))?;
        scattered.nothing_else_changed()?;
    }
    // From the middle of a page over many: contiguous, so that the rest are whole pages.
    let all = memory(&*dyn_bus(&drive), 256 << 10)?;
    both_ways(&mut drive, 30_000, &[all.slice(512, 200 << 10)?], 210).context("from a middle")
}

pub fn prp_refuses_what_it_cannot_say() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, with(DescriptorPreference::Prp))?;
    let all = memory(&*dyn_bus(&drive), 16 << 10)?;
    // A gap within a page.
    let parts = [all.slice(0, 512)?, all.slice(8192, 512)?];
    let refused = drive.read_dma(FIRST, Lba(0), &parts);
    ensure!(matches!(refused, Err(Error::Descriptor { .. })), "{refused:?}");
    // Nothing was sent, and the drive still works.
    Ok(drive.read_dma(FIRST, Lba(0), &[all.slice(0, 1024)?])?)
}

pub fn odd_bytes_in_one_block() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, with(DescriptorPreference::Sgl))?;
    ensure!(matches!(drive.info().descriptor_mode, DescriptorMode::Sgl { .. }));
    for (start, len, seed) in [(1, 512, 300), (4095, 4096, 302), (777, 512 << 10, 304)] {
        let scattered = Scattered::new(&drive, &[len], start, 9)?;
        both_ways(&mut drive, 40_000, &scattered.parts, seed)
            .with_context(|| format!("{len} bytes from byte {start} on"))?;
        scattered.nothing_else_changed()?;
    }
    Ok(())
}

/// Returns `blocks` lengths of `len` bytes, the last one longer, so that the total is whole LBAs.
fn lengths(blocks: usize, len: usize) -> Vec<usize> {
    let mut lengths = vec![len; blocks];
    let total = blocks * len;
    lengths[blocks - 1] += total.next_multiple_of(512) - total;
    lengths
}

/// Up to 256 blocks of odd lengths: only a last segment.
pub fn odd_bytes_in_one_segment() -> Result<()> {
    blocks_of_odd_lengths(&[(2, 255), (3, 341), (255, 77), (256, 513)], 310)
}

/// One block more than a segment holds, and as many as the driver's areas can describe.
pub fn segments_in_a_chain() -> Result<()> {
    blocks_of_odd_lengths(&[(257, 513), (511, 1023)], 330)
}

fn blocks_of_odd_lengths(shapes: &[(usize, usize)], seed: u64) -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, with(DescriptorPreference::Sgl))?;
    let before = reads(&mut drive)?;
    for (index, &(blocks, len)) in shapes.iter().enumerate() {
        let scattered = Scattered::new(&drive, &lengths(blocks, len), 5, 3)?;
        both_ways(&mut drive, 41_000, &scattered.parts, seed + 2 * index as u64)
            .with_context(|| format!("{blocks} blocks of {len} bytes"))?;
        scattered.nothing_else_changed()?;
    }
    let sent = reads(&mut drive)? - before;
    ensure!(sent == shapes.len() as u128, "{sent} reads for {} transfers", shapes.len());
    Ok(())
}

/// One call, several commands: exactly as many as MDTS requires.
pub fn splits_at_mdts() -> Result<()> {
    const BYTES: usize = 3 << 20;
    for descriptors in [DescriptorPreference::Prp, DescriptorPreference::Sgl] {
        let space = space()?;
        let bus_a = bus(&space, DRIVE_A)?;
        let mut drive = attach(&bus_a, with(descriptors))?;
        let mdts = drive.info().mdts_bytes.context("no MDTS")? as usize;
        let before = reads(&mut drive)?;
        let all = memory(&*dyn_bus(&drive), BYTES)?;
        drive.read_dma(FIRST, Lba(0), std::slice::from_ref(&all))?;
        let sent = reads(&mut drive)? - before;
        ensure!(sent == (BYTES / mdts) as u128, "{sent} commands for {BYTES} bytes");
        both_ways(&mut drive, 50_000, &[all], 350)?;
    }
    Ok(())
}

/// Returns the read commands that the drive has counted.
fn reads(drive: &mut Controller) -> Result<u128> {
    Ok(u128::from_le_bytes(drive.smart_log()?.host_reads))
}

/// Write Zeroes and Deallocate: commands without data, and with data that is not stored.
pub fn zeroes_without_data() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let mut host = Host::open()?;
    let (text, zeroes) = (pattern(340, 64 << 10), vec![0; 64 << 10]);
    drive.write(FIRST, Lba(60_000), &text, true)?;
    drive.write_zeroes(FIRST, LbaRange { lba: Lba(60_000), lbas: 128 }, false)?;
    ensure!(host.hash(FILE_A, 60_000 * 512, zeroes.len())? == host::hash(&zeroes));
    drive.write(FIRST, Lba(60_000), &text, true)?;
    let range = |lba, lbas| LbaRange { lba: Lba(lba), lbas };
    drive.deallocate(FIRST, &[range(60_000, 16), range(60_064, 16)])?;
    let mut found = vec![0; text.len()];
    drive.read(FIRST, Lba(60_000), &mut found)?;
    // The drive chooses what deallocated LBAs read as; the others keep their data.
    for (from, to) in [(16, 64), (80, 128)] {
        let part = from * 512..to * 512;
        same("beside deallocated LBAs", &found[part.clone()], &text[part])?;
    }
    Ok(())
}
