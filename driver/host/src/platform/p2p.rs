//! Proof that a controller can access a piece of memory, before it is used.
//!
//! A wrong IOMMU mode, a bridge that does not route between its ports, or an access control bit
//! (ACS) breaks peer-to-peer DMA, often silently: commands complete with success, and the bytes go
//! elsewhere or nowhere. So every access path that this driver uses is tried, and the bytes that
//! arrived are compared. [`prove`] writes nothing to the medium; [`round_trip`] needs less of the
//! memory, and some LBAs.
#![allow(unsafe_code, reason = "copies to a GPU")]

mod round_trip;

use std::fmt;

use nvme_spec::{
    admin::{AdminOpcode, Cns, Identify},
    identify::Oncs,
    ids::{Cid, Lba, Lbas, Nsid, QueueId},
    nvm::{BlockRange, NvmOpcode},
    sqe::Sqe,
    status::Status,
};

use super::{buffer::Buffer, window::Window};
use crate::{
    clock::{Nanos, Waiter},
    controller::Controller,
    descriptor::{BufferArea, describe},
    dma::{DmaSlice, IovaRange, Place},
    error::{Error, TimeoutOutcome},
    grant::{DescriptorMode, QueueMemory, Quiesced},
    queue::{Completion, QueuePair},
    state::State,
};

pub use round_trip::round_trip;

/// Depth of the queue that is created in the memory.
const DEPTH: u32 = 16;
/// Pages of data, if one command may transfer that much: enough for a PRP list.
const DATA_PAGES: usize = 4;
/// Time limit of a command on the queue. One whose completion goes astray never ends.
const TIMEOUT: Nanos = Nanos::from_millis(2_000);

/// A kind of access of a controller to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RouteCheck {
    /// Admin data written into the memory by the controller (Identify Controller).
    AdminData,
    /// Command fetches from the memory and completions written to it.
    Queues,
    /// Fetch of a PRP list or an SGL segment from the memory, and read data written to it.
    Read,
    /// Data read from the memory (Compare with the medium, which changes nothing).
    Compare,
    /// Copies by the GPU between the memory and this process, both ways.
    Copies,
    /// Data written from the memory to the medium, checked by the driver's own read.
    ToMedium,
    /// Data on the medium, written by the driver, read into the memory.
    FromMedium,
}

impl fmt::Display for RouteCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AdminData => "admin data written into it",
            Self::Queues => "commands fetched from it, completions written into it",
            Self::Read => "descriptors fetched from it, read data written into it",
            Self::Compare => "data fetched from it",
            Self::Copies => "the GPU's copies between it and this process",
            Self::ToMedium => "data written from it to the drive",
            Self::FromMedium => "data read from the drive into it",
        })
    }
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes arrived.
    Works,
    /// The check was not tried, for this reason.
    NotTried(String),
    /// The check failed, for this reason.
    Fails(String),
}

/// Results of the checks of a controller's access to a piece of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteReport {
    /// The controller.
    pub ctrl: String,
    /// The first byte of the memory, as each side addresses it.
    pub place: Place,
    /// Length in bytes.
    pub len: usize,
    /// All checks with their results.
    pub checks: Vec<(RouteCheck, Outcome)>,
}

impl RouteReport {
    /// Returns whether no check failed.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.why().is_none()
    }

    /// Returns the first failure.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        self.checks.iter().find_map(|(check, outcome)| match outcome {
            Outcome::Fails(why) => Some(format!("{check}: {why}")),
            _ => None,
        })
    }

    fn add(&mut self, check: RouteCheck, outcome: Outcome) {
        tracing::debug!(ctrl = %self.ctrl, %check, ?outcome, "route");
        self.checks.push((check, outcome));
    }

    fn log(&self) {
        match self.why() {
            None => tracing::info!("the controller reaches the memory"),
            Some(why) => tracing::error!(%why, "the controller does not reach the memory"),
        }
    }
}

impl fmt::Display for RouteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ctrl, place, len, checks } = self;
        let verdict = if self.is_ok() { "works" } else { "does not work" };
        write!(f, "{ctrl}: DMA to {len} bytes at {} {verdict}", place.iova)?;
        for (check, outcome) in checks {
            match outcome {
                Outcome::Works => write!(f, "\n  {check}: ok")?,
                Outcome::NotTried(why) => write!(f, "\n  {check}: not tried, {why}")?,
                Outcome::Fails(why) => write!(f, "\n  {check}: FAILS, {why}")?,
            }
        }
        Ok(())
    }
}

/// Layout of the memory in [`prove`].
struct Layout {
    memory: QueueMemory,
    data: Window,
    lbas: u32,
}

/// Returns the bytes that [`prove`] needs, at most: three pages for a queue, plus data.
#[must_use]
pub fn scratch_bytes(controller: &Controller) -> usize {
    let page = controller.info().page_bytes as usize;
    // LBAs are at most 64 KiB.
    page * 3 + (page * DATA_PAGES).max(64 << 10)
}

/// Tests whether the controller can access `scratch`: page-aligned memory of its address space that
/// is mapped in this process, at least [`scratch_bytes`] long. Overwrites it; the namespace is only
/// read (its first LBAs).
///
/// The report lists the checks that failed.
///
/// # Errors
/// Returns [`Error::QueueState`] or [`Error::Dma`] if the memory or the controller's queues do not
/// allow the attempt. Returns any other [`Error`] if the controller itself becomes unusable, which
/// a failed DMA may cause; call [`Controller::reset`] then.
pub fn prove(
    controller: &mut Controller,
    nsid: Nsid,
    scratch: &DmaSlice,
) -> Result<RouteReport, Error> {
    let layout = divide(controller, nsid, scratch)?;
    let mut report = RouteReport {
        ctrl: controller.id().to_owned(),
        place: scratch.place(),
        len: scratch.len(),
        checks: Vec::new(),
    };
    let span = tracing::info_span!("prove", ctrl = %report.ctrl, iova = %scratch.iova());
    let _entered = span.enter();
    let outcome = admin_data(controller, scratch, &layout.data)?;
    report.add(RouteCheck::AdminData, outcome);
    if report.is_ok() {
        queue_checks(controller, nsid, &layout, &mut report)?;
    }
    report.log();
    Ok(report)
}

fn divide(controller: &Controller, nsid: Nsid, scratch: &DmaSlice) -> Result<Layout, Error> {
    let ctrl = controller.port.id.clone();
    let namespace = controller.namespace(nsid)?;
    let page = controller.info.page_bytes as usize;
    let lba = 1usize << namespace.lba_shift;
    let most = controller.info.mdts_bytes.map_or(usize::MAX, |mdts| mdts as usize);
    let whole = usize::try_from(namespace.lbas).unwrap_or(usize::MAX).saturating_mul(lba);
    let bytes = (page * DATA_PAGES).max(lba).min(most).min(whole) / lba * lba;
    let part = |offset, len| {
        scratch.slice(offset, len).map_err(|source| Error::Dma { ctrl: ctrl.clone(), source })
    };
    let queue = |offset, entry: usize| part(offset, DEPTH as usize * entry);
    let memory = QueueMemory {
        sq: queue(0, 64)?,
        cq: queue(page, 16)?,
        descriptors: queue(2 * page, page / DEPTH as usize)?,
    };
    // Identify writes 4096 bytes, even if an LBA is smaller.
    let data = part(3 * page, bytes.max(4096))?;
    let none = || Error::QueueState {
        ctrl: ctrl.clone(),
        qid: QueueId(0),
        what: "the memory has no address in this process, so what arrives cannot be compared"
            .into(),
    };
    let data = Window::new(data).ok_or_else(none)?;
    Ok(Layout { memory, data, lbas: (bytes / lba) as u32 })
}

fn dma(controller: &Controller) -> impl FnOnce(crate::DmaError) -> Error + use<> {
    let ctrl = controller.port.id.clone();
    move |source| Error::Dma { ctrl, source }
}

/// Fills `data` so that every byte differs from `expected`.
fn poison(data: &Window, expected: &[u8]) -> Result<(), crate::DmaError> {
    let opposite: Vec<u8> = expected.iter().map(|byte| !byte).collect();
    data.write(0, &opposite)
}

/// Compares `data` with `expected`.
fn compare(data: &Window, expected: &[u8]) -> Result<Outcome, crate::DmaError> {
    let mut found = vec![0; expected.len()];
    data.read(0, &mut found)?;
    Ok(differences(&found, expected))
}

fn differences(found: &[u8], expected: &[u8]) -> Outcome {
    let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    let first = found.iter().zip(expected).position(|(a, b)| a != b);
    match first {
        None => Outcome::Works,
        Some(at) => Outcome::Fails(format!(
            "{wrong} of {} bytes did not arrive, the first at offset {at:#x}, though the command \
             ended with success; check the IOMMU's mode and log (dmesg: DMAR or AMD-Vi faults), \
             and ACS on the bridges between the two",
            expected.len()
        )),
    }
}

fn admin_data(
    controller: &mut Controller,
    scratch: &DmaSlice,
    data: &Window,
) -> Result<Outcome, Error> {
    let truth: [u8; 4096] = controller.identify(Cns::CONTROLLER, Nsid(0))?;
    poison(data, &truth).map_err(dma(controller))?;
    let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0, Cid(0), Nsid(0));
    Identify { cns: Cns::CONTROLLER, ..Default::default() }.write_to(&mut sqe);
    // Kept from here on: a controller that does not answer may still write it.
    let kept = controller.quarantine.len();
    controller.quarantine.push(scratch.clone());
    let sent = controller.admin_command("identify", sqe.with_prps(data.iova().0, 0));
    if !matches!(controller.state, State::Failed(_)) {
        controller.quarantine.truncate(kept);
    }
    match sent {
        Ok(_) => compare(data, &truth).map_err(dma(controller)),
        // The controller survived: the route is at fault.
        Err(
            error @ (Error::Command { .. }
            | Error::Timeout { outcome: TimeoutOutcome::ControllerReset, .. }),
        ) => Ok(Outcome::Fails(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Runs the checks that need a queue in the memory. Afterwards the queue is deleted, or the
/// controller is failed and keeps the memory.
fn queue_checks(
    controller: &mut Controller,
    nsid: Nsid,
    layout: &Layout,
    report: &mut RouteReport,
) -> Result<(), Error> {
    let mut truth = vec![0; (layout.lbas as usize) << controller.namespace(nsid)?.lba_shift];
    controller.read(nsid, Lba(0), &mut truth)?;
    let qid = match controller.create_queue_pair_in(layout.memory.clone()) {
        Ok(qid) => qid,
        Err(error @ Error::Command { .. }) => {
            report.add(RouteCheck::Queues, Outcome::Fails(error.to_string()));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let done = Prober::new(controller, qid, nsid, layout)
        .and_then(|mut prober| prober.run(&truth, report).map_err(dma(controller)));
    // It was never granted, and its only user is dropped.
    controller.reclaim(qid, &Quiesced::default())?;
    done
}

/// The queue in the memory and its user.
struct Prober<'a> {
    pair: QueuePair,
    clock: std::sync::Arc<dyn crate::clock::Clock>,
    layout: &'a Layout,
    mode: DescriptorMode,
    area: Buffer,
    nsid: Nsid,
    can_compare: bool,
}

impl<'a> Prober<'a> {
    fn new(
        controller: &Controller,
        qid: QueueId,
        nsid: Nsid,
        layout: &'a Layout,
    ) -> Result<Self, Error> {
        let QueueMemory { sq, cq, descriptors } = layout.memory.clone();
        let pair = QueuePair::new(&controller.port.bus, qid, DEPTH, sq, cq)
            .map_err(|source| Error::Queue { ctrl: controller.port.id.clone(), source })?;
        let area = Buffer::new(descriptors).ok_or_else(|| Error::QueueState {
            ctrl: controller.port.id.clone(),
            qid,
            what: "its descriptors have no address in this process".into(),
        })?;
        let can_compare = controller.info.nvm_commands.contains(Oncs::COMPARE);
        let (mode, clock) = (controller.info.descriptor_mode, controller.port.clock.clone());
        Ok(Self { pair, clock, layout, mode, area, nsid, can_compare })
    }

    fn run(&mut self, truth: &[u8], report: &mut RouteReport) -> Result<(), crate::DmaError> {
        // A flush has no data, so it tests the queues alone.
        let flush = Sqe::new(NvmOpcode::FLUSH.0, Cid(0), self.nsid);
        let flushed = self.command(&flush);
        report.add(RouteCheck::Queues, verdict(&flushed));
        if flushed.is_err() {
            return Ok(());
        }
        // The data arrives in two halves, the second one first, so that a list must be fetched.
        let (halves, expected) = self.halves(truth);
        poison(&self.layout.data, &expected)?;
        let read = self.transfer(NvmOpcode::READ, &halves);
        let outcome = match verdict(&read) {
            Outcome::Works => compare(&self.layout.data, &expected)?,
            other => other,
        };
        let works = outcome == Outcome::Works;
        report.add(RouteCheck::Read, outcome);
        if works {
            let outcome = self.compare_both_ways(&halves, &expected)?;
            report.add(RouteCheck::Compare, outcome);
        }
        Ok(())
    }

    /// Returns the parts of the data and the resulting contents of the memory.
    fn halves(&self, truth: &[u8]) -> (Vec<IovaRange>, Vec<u8>) {
        let iova = self.layout.data.iova();
        let half = truth.len() / 2;
        let page = match self.mode {
            DescriptorMode::Prp { page_bytes } => page_bytes as usize,
            DescriptorMode::Sgl { granularity, .. } => granularity as usize,
        };
        if half == 0 || !half.is_multiple_of(page) {
            return (vec![IovaRange { iova, len: truth.len() as u64 }], truth.to_vec());
        }
        let len = half as u64;
        let parts = vec![IovaRange { iova: iova.offset(len), len }, IovaRange { iova, len }];
        (parts, [&truth[half..], &truth[..half]].concat())
    }

    /// Tests that Compare succeeds with the right data and fails with one wrong bit: a constant
    /// answer would prove nothing.
    fn compare_both_ways(
        &mut self,
        halves: &[IovaRange],
        expected: &[u8],
    ) -> Result<Outcome, crate::DmaError> {
        if !self.can_compare {
            return Ok(Outcome::NotTried("the controller has no Compare command (ONCS)".into()));
        }
        let same = self.transfer(NvmOpcode::COMPARE, halves);
        let at = expected.len() - 1;
        self.layout.data.write(at, &[expected[at] ^ 1])?;
        let different = self.transfer(NvmOpcode::COMPARE, halves);
        Ok(match (verdict(&same), different) {
            (Outcome::Works, Ok(Status::COMPARE_FAILURE)) => Outcome::Works,
            (Outcome::Works, Ok(other)) => Outcome::Fails(format!(
                "a wrong bit was answered with {other}: the controller reads something else"
            )),
            (Outcome::Works, Err(why)) => Outcome::Fails(why),
            (other, _) => other,
        })
    }

    /// Runs a command on the first LBAs; data at `parts`, descriptors in the memory.
    fn transfer(&mut self, opcode: NvmOpcode, parts: &[IovaRange]) -> Result<Status, String> {
        let mut sqe = Sqe::new(opcode.0, Cid(0), self.nsid);
        let range = BlockRange::new(Lba(0), Lbas(self.layout.lbas));
        range.ok_or("the namespace has no blocks")?.write_to(&mut sqe);
        let len = self.area.len();
        let mut area = BufferArea::new(&mut self.area, 0, len);
        let descriptor = describe(self.mode, parts, u32::MAX, &mut area);
        let sqe = descriptor.map_err(|error| error.to_string())?.put_into(sqe);
        self.command(&sqe)
    }

    fn command(&mut self, sqe: &Sqe) -> Result<Status, String> {
        self.pair.post(sqe, 0).map_err(|error| error.to_string())?;
        self.pair.update_tail();
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + TIMEOUT);
        let mut found: Option<Completion> = None;
        loop {
            self.pair
                .reap(1, |completion| found = Some(completion))
                .map_err(|error| error.to_string())?;
            if let Some(completion) = found {
                return Ok(completion.status);
            }
            if !waiter.wait() {
                return Err(format!(
                    "no completion within {} ms: the controller does not see the command in this \
                     memory, or its completion went elsewhere",
                    TIMEOUT.0 / 1_000_000
                ));
            }
        }
    }
}

fn verdict(result: &Result<Status, String>) -> Outcome {
    match result {
        Ok(status) if status.is_success() => Outcome::Works,
        Ok(status) => Outcome::Fails(format!("the command ended with {status}")),
        Err(why) => Outcome::Fails(why.clone()),
    }
}
