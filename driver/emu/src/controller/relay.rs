//! Answers of the drive behind the namespace, in place of those of the software controller: what it
//! is, its health, and its placement handles.

use nvme_driver::platform::passthrough::{ADMIN, IO};
use nvme_spec::{
    admin::{AdminOpcode, Cns, FeatureId, GetFeatures, GetLogPage, Identify, LogPageId},
    fdp::IoManagementReceive,
    identify::{IdentifyController, Oncs},
    status::Status,
};
use zerocopy::FromBytes;

use super::{
    command::{Flow, Outcome},
    identify::{ACL_Z, AERL_Z, OAES, PAGE},
    storage::Storage,
    transfer::Request,
};

impl Storage {
    /// Answers an admin command about the drive; `None` if it is about this controller.
    pub(super) fn relay(&self, request: &Request<'_>) -> Option<Result<Flow, Status>> {
        let (drive, sqe) = (self.drive.as_deref()?, request.sqe);
        let is_own = sqe.nsid() == drive.namespace.nsid;
        let bytes = match AdminOpcode(sqe.opcode) {
            AdminOpcode::IDENTIFY => match Identify::from_sqe(sqe).cns {
                Cns::CONTROLLER | Cns::COMMAND_SET_CONTROLLER => PAGE,
                Cns::NAMESPACE | Cns::NAMESPACE_DESCRIPTORS if is_own => PAGE,
                _ => return None,
            },
            AdminOpcode::GET_LOG_PAGE => match GetLogPage::from_sqe(sqe) {
                GetLogPage {
                    lid: LogPageId::SMART | LogPageId::FDP_CONFIGURATIONS,
                    numd_z,
                    ..
                } => bytes(numd_z),
                _ => return None,
            },
            AdminOpcode::GET_FEATURES => match GetFeatures::from_sqe(sqe).fid {
                FeatureId::FLEXIBLE_DATA_PLACEMENT => 0,
                _ => return None,
            },
            // The kernel would use it meanwhile.
            AdminOpcode::FORMAT_NVM => return Some(Err(Status::INVALID_OPCODE)),
            _ => return None,
        };
        Some(self.ask(request, ADMIN, bytes))
    }

    /// Has the drive answer a command for its placement handles.
    pub(super) fn relay_receive(&self, request: &Request<'_>) -> Result<Flow, Status> {
        let numd_z = IoManagementReceive::from_sqe(request.sqe).numd_z;
        self.ask(request, IO, bytes(numd_z))
    }

    /// Has the drive answer a command that reads up to a page.
    fn ask(&self, request: &Request<'_>, queue: u32, bytes: usize) -> Result<Flow, Status> {
        let (sqe, mut page) = (request.sqe, [0; PAGE]);
        let page = page.get_mut(..bytes).ok_or(Status::INVALID_FIELD)?;
        let drive = self.drive.as_ref().ok_or(Status::INVALID_OPCODE)?;
        let dw0 = drive.relay(queue, sqe, page)?;
        let is_controller =
            sqe.opcode == AdminOpcode::IDENTIFY.0 && Identify::from_sqe(sqe).cns == Cns::CONTROLLER;
        if let (true, Ok(data)) = (is_controller, IdentifyController::mut_from_bytes(page)) {
            // The limits of this controller's queues and transfers.
            (data.sqes, data.cqes, data.sgls) = (0x66, 0x44, request.rules.sgls());
            data.mdts = (request.rules.bytes_max / PAGE as u64).trailing_zeros() as u8;
            (data.acl_z, data.aerl_z, data.oaes, data.oacs) = (ACL_Z, AERL_Z, OAES, 0);
            data.oncs &= (Oncs::DATASET_MANAGEMENT | Oncs::WRITE_ZEROES).bits();
        }
        request.deliver(page, bytes as u64)?;
        Ok(Flow::Done(Outcome::dw0(dw0)))
    }
}

/// Returns the bytes of a number of dwords.
fn bytes(numd_z: u32) -> usize {
    (numd_z as usize).saturating_add(1).saturating_mul(4)
}
