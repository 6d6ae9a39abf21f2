//! The fault plan and the power switch: faults of commands and of the whole device.

use nvme_driver::Nanos;
use nvme_spec::{
    nvm::{BlockRange, NvmOpcode},
    sqe::Sqe,
};

use super::{command::Ticket, namespace::Namespace};
use crate::{
    FaultPlan, PowerSwitch,
    fault::{CommandView, FaultAction, FaultEngine, FaultHit, RegisterFaults},
    media::DataFault,
};

/// A fault of the whole device, applied once no memory is being accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceFault {
    PowerLoss,
    Gone,
    LinkLoss(Nanos),
    GpuLost,
}

/// Faults of commands and of the device.
#[derive(Debug)]
pub(super) struct Faults {
    engine: FaultEngine,
    /// Fault of the whole device, applied once no DMA is in progress.
    pub pending: Option<DeviceFault>,
    power: Option<PowerSwitch>,
}

impl Faults {
    pub(super) fn new(plan: FaultPlan, power: Option<PowerSwitch>) -> Self {
        Self { engine: FaultEngine::new(plan), pending: None, power }
    }

    /// Replaces the plan and restarts its counters.
    pub(super) fn set_plan(&mut self, plan: FaultPlan) {
        self.engine = FaultEngine::new(plan);
    }

    pub(super) fn plan(&self) -> &FaultPlan {
        self.engine.plan()
    }

    pub(super) fn registers(&self) -> &RegisterFaults {
        &self.engine.plan().registers
    }

    /// Returns the plan's fault for a fetched command.
    #[inline]
    pub(super) fn decide(&mut self, ticket: &Ticket, sqe: &Sqe) -> Option<FaultHit> {
        if self.plan().rules.is_empty() {
            return None;
        }
        self.engine.decide(&view(ticket, sqe))
    }

    /// Counts an event of the power switch, if there is one. Returns whether the power is off: then
    /// nothing may happen any more, and the controller is gone once no memory is being accessed.
    #[inline]
    pub(super) fn pass_moment(&mut self) -> bool {
        let off = self.power.as_ref().is_some_and(PowerSwitch::pass_moment);
        if off {
            self.pending = Some(DeviceFault::Gone);
        }
        off
    }

    /// Returns whether the power is off.
    pub(super) fn power_is_cut(&self) -> bool {
        self.power.as_ref().is_some_and(PowerSwitch::is_cut)
    }
}

/// Returns the properties of a command that rules match on.
fn view(ticket: &Ticket, sqe: &Sqe) -> CommandView {
    let admin = ticket.sqid == 0;
    let ranged = matches!(
        NvmOpcode(sqe.opcode),
        NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE | NvmOpcode::WRITE_ZEROES
    );
    let range = BlockRange::from_sqe(sqe);
    CommandView {
        admin,
        opcode: sqe.opcode,
        nsid: sqe.nsid,
        qid: ticket.sqid,
        lbas: (!admin && ranged).then(|| (range.slba, u64::from(range.lbas().0))),
    }
}

/// Returns the data fault of `hit`, if it applies to a command of `namespace`.
pub(super) fn data_fault(namespace: &Namespace, sqe: &Sqe, hit: FaultHit) -> DataFault {
    let bytes = u64::from(BlockRange::from_sqe(sqe).lbas().0) << namespace.lba_shift;
    match (NvmOpcode(sqe.opcode), hit.action) {
        (NvmOpcode::WRITE, FaultAction::TornWrite) => {
            let unit = namespace.tear_bytes();
            DataFault::Torn { keep_bytes: hit.roll % bytes.div_ceil(unit) * unit }
        }
        (NvmOpcode::WRITE, FaultAction::MisdirectedWrite { lba_delta }) => {
            let delta = i128::from(lba_delta) << namespace.lba_shift;
            DataFault::Misdirected { delta_bytes: i64::try_from(delta).unwrap_or(i64::MAX) }
        }
        (NvmOpcode::READ, FaultAction::CorruptRead) => DataFault::Corrupt { seed: hit.roll },
        _ => DataFault::None,
    }
}
