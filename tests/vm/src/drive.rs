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

/// An address space with nothing in it yet. All devices are bound to VFIO afterwards.
pub fn space() -> Result<Arc<VfioSpace>> {
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B, PEER])?;
    Ok(VfioSpace::open("vm", SpaceOptions::default())?)
}

/// A drive's bus in `space`.
pub fn bus(space: &Arc<VfioSpace>, bdf: &str) -> Result<Arc<VfioBus>> {
    Ok(VfioBus::open(space, bdf.parse()?, &BusOptions::default())?)
}

/// Options with deadlines that a slow machine meets and a test can wait for.
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

/// A controller that is ready.
pub fn attach(bus: &Arc<VfioBus>, options: ControllerOptions) -> Result<Controller> {
    Ok(Controller::attach(bus.clone(), clock(), options)?)
}

/// A drive in a space of its own, with the usual options.
pub fn alone(bdf: &str, options: ControllerOptions) -> Result<(Arc<VfioSpace>, Controller)> {
    let space = space()?;
    let bus = bus(&space, bdf)?;
    let controller = attach(&bus, options)?;
    Ok((space, controller))
}

/// Memory of the address space of a controller.
pub fn memory(bus: &dyn Bus, bytes: usize) -> Result<DmaSlice> {
    Ok(DmaSlice::whole(bus.dma().alloc(bytes)?)?)
}

/// The bytes of a slice; volatile accesses, so that device memory is fine, too.
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

/// Where the device finds a slice.
pub fn range(slice: &DmaSlice) -> IovaRange {
    IovaRange { iova: slice.iova(), len: slice.len() as u64 }
}

/// Bytes that no other seed has, with no period that a block or a page has (xorshift64*).
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

/// Compares without printing megabytes.
pub fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{what}: {} bytes", found.len());
    if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
        let (found, expected) = (found[at], expected[at]);
        anyhow::bail!("{what}: byte {at} is {found:#04x} and should be {expected:#04x}");
    }
    Ok(())
}
