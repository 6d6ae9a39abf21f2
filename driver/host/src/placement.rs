//! Flexible Data Placement: the commands that read a namespace's placement handles, and their
//! answers (Base, "Flexible Data Placement").

use nvme_spec::{
    admin::{AdminOpcode, FeatureId, GetFeatures, GetLogPage, LogPageId},
    fdp::{
        FdpConfiguration, FdpConfigurationsHeader, IoManagementReceive, ManagementOperation,
        RuhStatus, RuhStatusHeader,
    },
    ids::{Cid, Nsid},
    nvm::NvmOpcode,
    sqe::Sqe,
};
use zerocopy::FromBytes;

/// NUMD of a page of 4096 bytes.
const PAGE_NUMD_Z: u32 = 4096 / 4 - 1;

/// Returns the command whose result is the `FdpMode` of an endurance group.
pub(crate) fn get_mode(group: u16) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::GET_FEATURES.0, Cid(0), Nsid(0));
    let fid = FeatureId::FLEXIBLE_DATA_PLACEMENT;
    GetFeatures { fid, ..Default::default() }.write_to(&mut sqe);
    sqe.cdw11 = group.into();
    sqe
}

/// Returns the I/O command that reads a namespace's Reclaim Unit Handle Status.
pub(crate) fn get_handles(nsid: Nsid) -> Sqe {
    let mut sqe = Sqe::new(NvmOpcode::IO_MANAGEMENT_RECEIVE.0, Cid(0), nsid);
    let operation = ManagementOperation::RECLAIM_UNIT_HANDLE_STATUS;
    IoManagementReceive { operation, specific: 0, numd_z: PAGE_NUMD_Z }.write_to(&mut sqe);
    sqe
}

/// Returns the command that reads the FDP Configurations log of an endurance group.
pub(crate) fn get_configurations(group: u16) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0, Cid(0), Nsid(0));
    let (lid, numd_z) = (LogPageId::FDP_CONFIGURATIONS, PAGE_NUMD_Z);
    GetLogPage { lid, numd_z, lsi: group, ..Default::default() }.write_to(&mut sqe);
    sqe
}

/// Returns the Placement Identifiers in a page of Reclaim Unit Handle Status; at most the 127 that
/// fit.
pub(crate) fn placement_ids(page: &[u8]) -> Vec<u16> {
    let Ok((header, rest)) = RuhStatusHeader::read_from_prefix(page) else { return Vec::new() };
    let descriptors = rest.chunks_exact(size_of::<RuhStatus>());
    let ids = descriptors.filter_map(|bytes| Some(RuhStatus::read_from_bytes(bytes).ok()?.pid));
    ids.take(header.descriptors.into()).collect()
}

/// Returns RUNS of configuration `index` in the FDP Configurations page.
pub(crate) fn reclaim_unit_bytes(page: &[u8], index: u8) -> Option<u64> {
    let (header, mut rest) = FdpConfigurationsHeader::read_from_prefix(page).ok()?;
    if u16::from(index) > header.configurations_z {
        return None;
    }
    for _ in 0..index {
        let (skipped, _) = FdpConfiguration::read_from_prefix(rest).ok()?;
        rest = rest.get(usize::from(skipped.size).max(size_of::<FdpConfiguration>())..)?;
    }
    let (found, _) = FdpConfiguration::read_from_prefix(rest).ok()?;
    (found.attributes & FdpConfiguration::VALID != 0).then_some(found.reclaim_unit_bytes)
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn the_configuration_in_use_is_found() {
        let mut page = vec![0; 4096];
        let header = FdpConfigurationsHeader { configurations_z: 1, ..Default::default() };
        page[..16].copy_from_slice(header.as_bytes());
        // Two handles, and eight vendor-specific bytes after the first configuration.
        for (at, size, bytes) in [(16, 64 + 8 + 8, 1 << 20), (16 + 80, 64, 3 << 20)] {
            let configuration = FdpConfiguration {
                size,
                attributes: FdpConfiguration::VALID,
                reclaim_unit_bytes: bytes,
                ..Default::default()
            };
            page[at..at + 64].copy_from_slice(configuration.as_bytes());
        }
        assert_eq!(reclaim_unit_bytes(&page, 0), Some(1 << 20));
        assert_eq!(reclaim_unit_bytes(&page, 1), Some(3 << 20));
        assert_eq!(reclaim_unit_bytes(&page, 2), None, "there are two");
        page[16 + 80 + 2] = 0;
        assert_eq!(reclaim_unit_bytes(&page, 1), None, "not valid");
        page.fill(0xFF);
        assert_eq!(reclaim_unit_bytes(&page, 255), None, "a size that leads past the end");
    }
}
