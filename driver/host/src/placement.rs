//! Flexible Data Placement: discovery of a namespace's placement handles (Base, "Flexible Data
//! Placement").

use nvme_spec::{
    admin::{AdminOpcode, FdpMode, FeatureId, GetFeatures, GetLogPage, LogPageId},
    fdp::{
        FdpConfiguration, FdpConfigurationsHeader, IoManagementReceive, ManagementOperation,
        RuhStatus, RuhStatusHeader,
    },
    identify::Ctratt,
    ids::{Cid, Nsid},
    nvm::NvmOpcode,
    sqe::Sqe,
};
use zerocopy::FromBytes;

use crate::{
    admin::DATA_BYTES,
    controller::Controller,
    error::Error,
    io::{Data, Work},
    namespace::NamespaceInfo,
};

impl Controller {
    /// Queries the placement handles of all namespaces. A drive that has none, or rejects the
    /// query, is used without.
    pub(crate) fn discover_placement(&mut self) -> Result<(), Error> {
        if !self.info.attributes.contains(Ctratt::FLEXIBLE_DATA_PLACEMENT) {
            return Ok(());
        }
        for at in 0..self.namespaces.len() {
            let NamespaceInfo { nsid, endurance_group, .. } = self.namespaces[at];
            if endurance_group == 0 {
                continue;
            }
            let Some(mode) = answered(self.fdp_mode(endurance_group))? else { continue };
            if !mode.enabled {
                continue;
            }
            let Some(ids) = answered(self.read_placement_ids(nsid))? else { continue };
            let bytes = answered(self.read_reclaim_unit(endurance_group, mode.configuration))?;
            let namespace = &mut self.namespaces[at];
            namespace.placement_ids = ids;
            namespace.reclaim_unit_bytes = bytes.unwrap_or(0);
        }
        Ok(())
    }

    fn fdp_mode(&mut self, group: u16) -> Result<FdpMode, Error> {
        let mut sqe = Sqe::new(AdminOpcode::GET_FEATURES.0, Cid(0), Nsid(0));
        let fid = FeatureId::FLEXIBLE_DATA_PLACEMENT;
        GetFeatures { fid, ..Default::default() }.write_to(&mut sqe);
        sqe.cdw11 = group.into();
        let done = self.admin_command("get features", sqe, self.options.admin_timeout)?;
        Ok(FdpMode::from_dword(done.result))
    }

    /// Returns the Placement Identifiers of a namespace; at most the 127 that fit in one page.
    fn read_placement_ids(&mut self, nsid: Nsid) -> Result<Vec<u16>, Error> {
        let mut page = [0; DATA_BYTES];
        let mut sqe = Sqe::new(NvmOpcode::IO_MANAGEMENT_RECEIVE.0, Cid(0), nsid);
        let operation = ManagementOperation::RECLAIM_UNIT_HANDLE_STATUS;
        let numd_z = (page.len() / 4 - 1) as u32;
        IoManagementReceive { operation, specific: 0, numd_z }.write_to(&mut sqe);
        const WHAT: &str = "reclaim unit handle status";
        self.run(Work::single(WHAT, sqe, Data::In(&mut page)))?;
        let header: RuhStatusHeader = self.read_from(WHAT, &page)?;
        let descriptors = page[size_of_val(&header)..].chunks_exact(size_of::<RuhStatus>());
        let ids = descriptors.filter_map(|bytes| Some(RuhStatus::read_from_bytes(bytes).ok()?.pid));
        Ok(ids.take(header.descriptors.into()).collect())
    }

    /// Returns the reclaim unit size of configuration `index`; 0 if the log does not report it.
    fn read_reclaim_unit(&mut self, group: u16, index: u8) -> Result<u64, Error> {
        let mut page = [0; DATA_BYTES];
        let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0, Cid(0), Nsid(0));
        let (lid, numd_z) = (LogPageId::FDP_CONFIGURATIONS, (page.len() / 4 - 1) as u32);
        GetLogPage { lid, numd_z, lsi: group, ..Default::default() }.write_to(&mut sqe);
        self.admin_read_bytes("get log page", sqe, &mut page)?;
        Ok(reclaim_unit_bytes(&page, index).unwrap_or(0))
    }

    /// Returns the Placement Identifier of `handle` for writes to `namespace`.
    pub(crate) fn placement_id(
        &self,
        namespace: &NamespaceInfo,
        handle: Option<u16>,
    ) -> Result<Option<u16>, Error> {
        let Some(handle) = handle else { return Ok(None) };
        if let Some(id) = namespace.placement_ids.get(usize::from(handle)) {
            return Ok(Some(*id));
        }
        let (nsid, count) = (namespace.nsid, namespace.placement_handles());
        let what = format!("placement handle {handle} of namespace {nsid}, which has {count}");
        let hint = "name one below NamespaceInfo::placement_handles(), or none";
        Err(Error::Unsupported { ctrl: self.id.clone(), what, hint })
    }
}

/// Turns a command that the controller rejected into `None`.
fn answered<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Err(error @ Error::Command { .. }) => {
            tracing::debug!(%error, "used without placement handles");
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Returns RUNS of configuration `index` in the FDP Configurations page.
fn reclaim_unit_bytes(page: &[u8], index: u8) -> Option<u64> {
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
