//! Proof for data alone: a known pattern travels from the memory to the drive and back.
//!
//! [`super::prove`] needs memory that is mapped in this process, tests every use of it, and writes
//! nothing to the medium. This test only needs data to arrive, so it also covers memory that only a
//! GPU can address, such as a store's pool before the store chooses its data path.
#![allow(unsafe_code, reason = "staging memory is raw, and copies are vouched for")]

use nvme_spec::ids::{Lba, Nsid};

use super::{Outcome, RouteCheck, RouteReport, differences};
use crate::{
    clock::{Clock, MonotonicClock, Nanos, Waiter},
    controller::Controller,
    copy::{CopyDirection, CopyEngine, CopyError, DeviceCopy},
    dma::{DevicePtr, DmaError, DmaSlice, ExternalMemory},
    error::{Error, TimeoutOutcome},
    platform::{mmio, window::Window},
};

/// Time limit for the copies of one step. Always in real time, because a GPU does not follow a
/// virtual clock.
const COPY_TIMEOUT: Nanos = Nanos::from_millis(10_000);

/// Tests whether data gets from `memory` to the drive and back. A pattern is put into the memory,
/// written to the namespace at `lba` and compared with the result of the driver's own read; then
/// the driver writes another pattern, which is read into the memory and checked. Needs whole LBAs
/// of memory, **overwrites them and as many LBAs of the namespace**.
///
/// Memory that is mapped in this process is filled and checked directly, other memory (a GPU's)
/// through `copies`.
///
/// The commands use the driver's own queue. Granted queues keep working unless a command times out
/// and only a reset of the controller helps. The test ends in bounded time: each command has
/// [`crate::ControllerOptions::command_timeout`], the copies of each step two seconds.
///
/// The report lists the checks that failed.
///
/// # Errors
/// Returns [`Error::Range`], [`Error::Namespace`] or [`Error::Dma`], without any effect, if the
/// arguments do not allow the attempt. Returns any other [`Error`] if the driver's own reads and
/// writes fail or the controller becomes unusable.
pub fn round_trip(
    controller: &mut Controller,
    nsid: Nsid,
    lba: Lba,
    memory: &DmaSlice,
    copies: Option<&dyn CopyEngine>,
) -> Result<RouteReport, Error> {
    let lba_bytes = controller.namespace(nsid)?.lba_bytes() as usize;
    let len = memory.len();
    if len == 0 || !len.is_multiple_of(lba_bytes) {
        let what = format!("{len} bytes of memory are not whole LBAs of {lba_bytes} bytes");
        return Err(Error::Range { ctrl: controller.port.id.clone(), nsid, what });
    }
    let mut report = RouteReport {
        ctrl: controller.id().to_owned(),
        place: memory.place(),
        len,
        checks: Vec::new(),
    };
    let span = tracing::info_span!("round_trip", ctrl = %report.ctrl, iova = %memory.iova());
    let _entered = span.enter();
    let access = Access::new(memory, copies)
        .map_err(|source| Error::Dma { ctrl: controller.port.id.clone(), source })?;
    let mut trip = Trip { controller, nsid, lba, memory, access };
    match trip.access.check(memory) {
        Some(Ok(())) => report.add(RouteCheck::Copies, Outcome::Works),
        Some(Err(why)) => report.add(RouteCheck::Copies, Outcome::Fails(why)),
        None => {}
    }
    if report.is_ok() {
        let outcome = trip.write_out()?;
        report.add(RouteCheck::ToMedium, outcome);
    }
    if report.is_ok() {
        let outcome = trip.read_in()?;
        report.add(RouteCheck::FromMedium, outcome);
    }
    report.log();
    Ok(report)
}

struct Trip<'a> {
    controller: &'a mut Controller,
    nsid: Nsid,
    lba: Lba,
    memory: &'a DmaSlice,
    access: Access<'a>,
}

impl Trip<'_> {
    /// Tests memory to drive. The driver first writes the opposite, so that data of an earlier
    /// proof on the medium cannot pass for this one's.
    fn write_out(&mut self) -> Result<Outcome, Error> {
        let expected = pattern(self.memory, 1);
        self.controller.write(self.nsid, self.lba, &opposite(&expected), false)?;
        if let Err(why) = self.access.put(self.memory, &expected) {
            return Ok(Outcome::Fails(why));
        }
        let parts = std::slice::from_ref(self.memory);
        let sent = self.controller.write_dma(self.nsid, self.lba, parts, false);
        if let Some(failed) = blame(sent)? {
            return Ok(failed);
        }
        let mut found = vec![0; expected.len()];
        self.controller.read(self.nsid, self.lba, &mut found)?;
        Ok(differences(&found, &expected))
    }

    /// Tests drive to memory.
    fn read_in(&mut self) -> Result<Outcome, Error> {
        let expected = pattern(self.memory, 2);
        self.controller.write(self.nsid, self.lba, &expected, false)?;
        if let Err(why) = self.access.put(self.memory, &opposite(&expected)) {
            return Ok(Outcome::Fails(why));
        }
        let parts = std::slice::from_ref(self.memory);
        let sent = self.controller.read_dma(self.nsid, self.lba, parts);
        if let Some(failed) = blame(sent)? {
            return Ok(failed);
        }
        let mut found = vec![0; expected.len()];
        Ok(match self.access.get(self.memory, &mut found) {
            Ok(()) => differences(&found, &expected),
            Err(why) => Outcome::Fails(why),
        })
    }
}

/// Attributes a failure to the route if the controller survived.
fn blame(sent: Result<(), Error>) -> Result<Option<Outcome>, Error> {
    match sent {
        Ok(()) => Ok(None),
        Err(Error::Timeout { outcome: TimeoutOutcome::ControllerFailed, .. }) => {
            sent.map(|()| None)
        }
        Err(error @ (Error::Command { .. } | Error::Timeout { .. } | Error::Descriptor { .. })) => {
            Ok(Some(Outcome::Fails(error.to_string())))
        }
        Err(error) => Err(error),
    }
}

/// Returns bytes that differ for every address and `round`.
fn pattern(memory: &DmaSlice, round: u64) -> Vec<u8> {
    let mut state = (memory.iova().0 ^ round << 60).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(memory.len() + 8);
    while bytes.len() < memory.len() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(memory.len());
    bytes
}

/// Returns a copy that differs in every byte.
fn opposite(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

/// Access of this process to the memory.
enum Access<'a> {
    Window(Window),
    Copies(Copies<'a>),
}

struct Copies<'a> {
    engine: &'a dyn CopyEngine,
    staging: ExternalMemory,
    device: DevicePtr,
}

impl<'a> Access<'a> {
    fn new(memory: &DmaSlice, copies: Option<&'a dyn CopyEngine>) -> Result<Self, DmaError> {
        if let Some(window) = Window::new(memory.clone()) {
            return Ok(Self::Window(window));
        }
        let refuse = |what: String, hint: &str| DmaError::Unsupported {
            space: "round trip".into(),
            what,
            hint: hint.into(),
        };
        let Some(device) = memory.device() else {
            let what = "memory with an address neither here nor on a GPU".to_owned();
            return Err(refuse(what, "what arrives in it cannot be seen"));
        };
        let Some(engine) = copies else {
            let what = "memory that only a GPU addresses".to_owned();
            return Err(refuse(what, "give the GPU's copy engine"));
        };
        let staging = engine
            .host_memory(memory.len())
            .map_err(|error| refuse(error.to_string(), "free memory that the GPU can reach"))?;
        if staging.host.is_none() || staging.len < memory.len() {
            let what = "a copy engine's memory that this process cannot reach".to_owned();
            return Err(refuse(what, "this is a defect of the copy engine"));
        }
        Ok(Self::Copies(Copies { engine, staging, device }))
    }

    /// Tests the copies themselves. Returns `None` if none are needed.
    fn check(&mut self, memory: &DmaSlice) -> Option<Result<(), String>> {
        if matches!(self, Self::Window(_)) {
            return None;
        }
        let expected = pattern(memory, 3);
        Some(self.check_copies(memory, &expected))
    }

    fn check_copies(&mut self, memory: &DmaSlice, expected: &[u8]) -> Result<(), String> {
        let mut found = vec![0; expected.len()];
        self.put(memory, &opposite(expected))?;
        self.put(memory, expected)?;
        self.get(memory, &mut found)?;
        match found.iter().zip(expected).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("what was copied to the GPU came back changed at {at:#x}")),
        }
    }

    fn put(&mut self, memory: &DmaSlice, bytes: &[u8]) -> Result<(), String> {
        match self {
            Self::Window(window) => window.write(0, bytes).map_err(|error| error.to_string()),
            Self::Copies(copies) => {
                let host = copies.host()?;
                // SAFETY: the staging memory is as long as `memory`, which is `bytes` long, and no
                // copy uses it: each was waited for.
                unsafe { mmio::copy_to(host, bytes) };
                copies.run(memory, CopyDirection::HostToDevice)
            }
        }
    }

    fn get(&mut self, memory: &DmaSlice, bytes: &mut [u8]) -> Result<(), String> {
        match self {
            Self::Window(window) => window.read(0, bytes).map_err(|error| error.to_string()),
            Self::Copies(copies) => {
                let host = copies.host()?;
                // Data of an earlier copy must not pass for this one's.
                // SAFETY: as in `put`.
                unsafe { mmio::zero(host, bytes.len()) };
                copies.run(memory, CopyDirection::DeviceToHost)?;
                // SAFETY: as in `put`.
                unsafe { mmio::copy_from(host, bytes) };
                Ok(())
            }
        }
    }
}

impl Copies<'_> {
    fn host(&self) -> Result<std::ptr::NonNull<u8>, String> {
        self.staging.host.ok_or_else(|| "the copy engine's memory is gone".to_owned())
    }

    /// Copies all of the memory and waits.
    fn run(&self, memory: &DmaSlice, direction: CopyDirection) -> Result<(), String> {
        let words = |error: CopyError| error.to_string();
        let copy =
            DeviceCopy { host: self.host()?, device: self.device, len: memory.len(), direction };
        // SAFETY: `self` and the caller keep both, used by nothing else, until the copy is done; if
        // it does not end, both are leaked below.
        let fence = unsafe { self.engine.submit(&[copy]) }.map_err(words)?;
        let clock = MonotonicClock::default();
        let mut waiter = Waiter::new(&clock, clock.now() + COPY_TIMEOUT);
        while !self.engine.is_done(fence).map_err(words)? {
            if !waiter.wait() {
                std::mem::forget((self.staging.owner.clone(), memory.clone()));
                let millis = COPY_TIMEOUT.0 / 1_000_000;
                return Err(format!(
                    "the GPU did not copy {} bytes within {millis} ms; the memory is leaked, \
                     because it still may",
                    memory.len()
                ));
            }
        }
        Ok(())
    }
}
