//! Flexible Data Placement (Base, "Flexible Data Placement"): one endurance group with all
//! namespaces, one reclaim group, and one placement handle per namespace and reclaim unit handle. A
//! Placement Identifier is thus the number of a handle.

use nvme_spec::{
    fdp::{
        FdpConfiguration, FdpConfigurationsHeader, IoManagementReceive, ManagementOperation,
        RuhStatus, RuhStatusHeader,
    },
    nvm::{Directive, DirectiveType, NvmOpcode},
    sqe::Sqe,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    command::{Flow, Outcome},
    storage::Storage,
    transfer::Request,
};

/// The endurance group of all namespaces.
pub(super) const ENDURANCE_GROUP: u16 = 1;

impl Storage {
    /// Returns ENDGID and ENDGIDMAX.
    pub(super) fn endurance_group(&self) -> u16 {
        if self.placement.is_some() { ENDURANCE_GROUP } else { 0 }
    }

    /// Returns the placement handle of a command.
    pub(super) fn placement_handle(&self, sqe: &Sqe) -> Result<u16, Status> {
        let Directive { kind, specific } = Directive::from_sqe(sqe);
        if NvmOpcode(sqe.opcode) != NvmOpcode::WRITE {
            return Ok(0);
        }
        match (kind, self.placement) {
            (DirectiveType::NONE, _) => Ok(0),
            // An invalid identifier is not an error: the controller chooses.
            (DirectiveType::DATA_PLACEMENT, Some(placement)) => {
                Ok(if specific < placement.handles { specific } else { 0 })
            }
            (DirectiveType::DATA_PLACEMENT, None) if self.drive.is_some() => Ok(specific),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Executes an "I/O Management Receive command".
    pub(super) fn io_management_receive(&self, request: &Request<'_>) -> Result<Flow, Status> {
        let index = self.index(request.sqe)?;
        if self.drive.is_some() {
            return self.relay_receive(request);
        }
        let placement = self.placement.ok_or(Status::INVALID_OPCODE)?;
        let command = IoManagementReceive::from_sqe(request.sqe);
        let bytes = (u64::from(command.numd_z) + 1) * 4;
        match command.operation {
            ManagementOperation::NONE => return Ok(Flow::Done(Outcome::OK)),
            ManagementOperation::RECLAIM_UNIT_HANDLE_STATUS => {}
            _ => return Err(Status::INVALID_FIELD),
        }
        if bytes > request.rules.bytes_max {
            return Err(Status::INVALID_FIELD);
        }
        let ruamw = placement.reclaim_unit_bytes >> self.namespaces[index].lba_shift;
        let header = RuhStatusHeader { descriptors: placement.handles, ..Default::default() };
        let mut status = header.as_bytes().to_vec();
        for pid in 0..placement.handles {
            let handle = RuhStatus { pid, ruhid: pid, ruamw, ..Default::default() };
            status.extend_from_slice(handle.as_bytes());
        }
        request.deliver(&status, bytes)?;
        Ok(Flow::Done(Outcome::OK))
    }

    /// Builds "FDP Configurations": one configuration with one reclaim group.
    pub(super) fn fdp_page(&self, page: &mut [u8], group: u16) -> Result<usize, Status> {
        let placement = self.placement.ok_or(Status::INVALID_LOG_PAGE)?;
        if group != ENDURANCE_GROUP {
            return Err(Status::INVALID_FIELD);
        }
        let (header, handles) = (size_of::<FdpConfigurationsHeader>(), placement.handles);
        // One dword per handle, padded to a multiple of 8 bytes.
        let all = (size_of::<FdpConfiguration>() + 4 * usize::from(handles)).next_multiple_of(8);
        let configurations =
            FdpConfigurationsHeader { size: (header + all) as u32, ..Default::default() };
        let configuration = FdpConfiguration {
            size: all as u16,
            attributes: FdpConfiguration::VALID,
            reclaim_groups: 1,
            reclaim_unit_handles: handles,
            placement_ids_max_z: handles - 1,
            namespaces_max: self.namespaces.len() as u32,
            reclaim_unit_bytes: placement.reclaim_unit_bytes,
            ..FdpConfiguration::default()
        };
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            page[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(configurations.as_bytes());
        put(configuration.as_bytes());
        (0..handles).for_each(|_| put(FdpConfiguration::INITIALLY_ISOLATED.as_bytes()));
        Ok(header + all)
    }
}
