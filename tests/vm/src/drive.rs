//! Drives opened through VFIO, as the tests use them.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use nvme_driver::platform::vfio::{BusOptions, SpaceOptions, VfioBus, VfioSpace};
use nvme_driver::platform::window::Window;
use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, DmaSlice, IovaRange, MonotonicClock, Nanos,
};
use nvme_spec::ids::Nsid;

use crate::hardware::{DRIVE_A, DRIVE_B, PEER};
use crate::pci;

/// The first namespace of any drive, and the second one of drive B.
pub const FIRST: Nsid = Nsid(1);
pub const SECOND: Nsid = Nsid(2);

/// Returns an empty address space. Binds all devices to VFIO.
pub fn space() -> Result<Arc<VfioSpace>> {
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B, PEER])?;
    Ok(VfioSpace::open("vm", SpaceOptions::default())?)
}

/// Opens a drive's bus in `space`.
pub fn bus(space: &Arc<VfioSpace>, bdf: &str) -> Result<Arc<VfioBus>> {
    Ok(VfioBus::open(space, bdf.parse()?, &BusOptions::default())?)
}

/// Returns options with timeouts that a slow machine meets and a test can wait for.
pub fn options() -> ControllerOptions {
    ControllerOptions {
        io_queues: 4,
        command_timeout: Nanos::from_millis(8_000),
        ..ControllerOptions::default()
    }
}

pub fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::default())
}

/// Attaches a controller.
pub fn attach(bus: &Arc<VfioBus>, options: ControllerOptions) -> Result<Controller> {
    Ok(Controller::attach(bus.clone(), clock(), options)?)
}

/// Attaches a drive in its own space, with the usual options.
pub fn alone(bdf: &str, options: ControllerOptions) -> Result<(Arc<VfioSpace>, Controller)> {
    let space = space()?;
    let bus = bus(&space, bdf)?;
    let controller = attach(&bus, options)?;
    Ok((space, controller))
}

/// Allocates memory in the address space of a controller.
pub fn memory(bus: &dyn Bus, bytes: usize) -> Result<DmaSlice> {
    Ok(DmaSlice::whole(bus.dma().alloc(bytes)?)?)
}

/// Returns the bytes of a slice, with volatile accesses that suit device memory, too.
pub fn bytes_of(slice: &DmaSlice) -> Result<Vec<u8>> {
    let mut bytes = vec![0; slice.len()];
    window(slice)?.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes a slice from its beginning.
pub fn fill(slice: &DmaSlice, bytes: &[u8]) -> Result<()> {
    Ok(window(slice)?.write(0, bytes)?)
}

fn window(slice: &DmaSlice) -> Result<Window> {
    Window::new(slice.clone()).context("memory that the CPU does not reach")
}

/// Returns the IOVA range of a slice.
pub fn range(slice: &DmaSlice) -> IovaRange {
    IovaRange { iova: slice.iova(), len: slice.len() as u64 }
}

/// Returns bytes that differ for each seed, and do not repeat by block or page (xorshift64*).
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Compares bytes without printing megabytes.
pub fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{what}: {} bytes", found.len());
    if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
        let (found, expected) = (found[at], expected[at]);
        anyhow::bail!("{what}: byte {at} is {found:#04x} and should be {expected:#04x}");
    }
    Ok(())
}
