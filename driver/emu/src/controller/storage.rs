//! The namespaces with their media.

use std::{ops::Range, sync::Arc};

use nvme_driver::{Nanos, platform::passthrough::Passthrough};
use nvme_spec::{ids::Nsid, sqe::Sqe, status::Status};

use super::{
    command::{Flow, Operations, Outcome, Wait, status_of},
    namespace::Namespace,
    transfer::Request,
};
use crate::{
    PlacementConfig,
    bounce::Copies,
    config::NamespaceConfig,
    domain::SgList,
    media::{DataFault, MediaDone, MediaError, MediaKind, MediaOp},
};

/// Token of the flushes of a shutdown, which no command has.
const SHUTDOWN_TOKEN: u64 = u64::MAX;

/// The namespaces, and their operations in flight.
#[derive(Debug)]
pub(super) struct Storage {
    pub namespaces: Vec<Namespace>,
    pub placement: Option<PlacementConfig>,
    /// The drive behind the only namespace.
    pub drive: Option<Arc<Passthrough>>,
    /// Identifier of the first namespace.
    pub first: u32,
    /// Operations that failed on media.
    pub media_errors: u64,
    /// Empty lists kept for their capacity.
    pub spare: Vec<SgList>,
    done: Vec<MediaDone>,
}

impl Storage {
    pub(super) fn new(
        namespaces: Vec<NamespaceConfig>,
        placement: Option<PlacementConfig>,
        drive: Option<Arc<Passthrough>>,
        copies: Option<&Copies>,
    ) -> Self {
        let namespaces =
            namespaces.into_iter().map(|config| Namespace::new(config, copies)).collect();
        let first = drive.as_ref().map_or(1, |drive| drive.namespace.nsid.0);
        let (spare, done) = (Vec::new(), Vec::new());
        Self { namespaces, placement, drive, first, media_errors: 0, spare, done }
    }

    /// Returns the namespace `nsid`.
    pub(super) fn active(&self, nsid: u32) -> Result<&Namespace, Status> {
        self.namespaces.get(self.place(nsid)).ok_or(Status::INVALID_NAMESPACE)
    }

    /// Returns the index that a namespace has, if it exists.
    pub(super) fn place(&self, nsid: u32) -> usize {
        // "Namespace Identifier": 0 and FFFFFFFFh wrap to nonexistent indices.
        nsid.wrapping_sub(self.first) as usize
    }

    /// Returns the index of the namespace of `sqe`.
    #[inline]
    pub(super) fn index(&self, sqe: &Sqe) -> Result<usize, Status> {
        if self.active(sqe.nsid)?.formatting {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        Ok(self.place(sqe.nsid))
    }

    /// Returns the indices of the namespaces that `nsid` selects.
    pub(super) fn targets(&self, nsid: u32) -> Result<Range<usize>, Status> {
        if nsid == Nsid::ALL.0 {
            return Ok(0..self.namespaces.len());
        }
        self.active(nsid).map(|_| self.place(nsid)..self.place(nsid) + 1)
    }

    /// Returns the number of operations in flight on media, including cancelled ones.
    pub(super) fn in_flight(&self) -> usize {
        self.namespaces.iter().map(Namespace::in_flight).sum()
    }

    /// Returns the time of the next event of a medium.
    pub(super) fn next_event(&self) -> Option<Nanos> {
        self.namespaces.iter().filter_map(Namespace::media_event).min()
    }

    /// Takes finished media operations, in a list to be given back with [`Storage::keep`].
    pub(super) fn poll(&mut self, now: Nanos) -> Vec<MediaDone> {
        for namespace in &mut self.namespaces {
            if namespace.in_flight() > 0 {
                namespace.poll(now, &mut self.done);
            }
        }
        std::mem::take(&mut self.done)
    }

    /// Keeps an empty list for its capacity.
    pub(super) fn keep(&mut self, done: Vec<MediaDone>) {
        self.done = done;
    }

    /// Releases the memory of an operation. While an access to the domain is held, all of it stays
    /// mapped, and this frees nothing.
    #[inline]
    pub(super) fn release(&mut self, mut sg_list: SgList) {
        sg_list.clear();
        self.spare.push(sg_list);
    }

    /// Starts operations without data: (namespace, kind, offset, length).
    pub(super) fn start(
        &mut self,
        request: &Request<'_>,
        operations: impl Iterator<Item = (usize, MediaKind, u64, u64)>,
    ) -> Flow {
        let (mut pending, mut failed) = (0, None);
        for operation in operations {
            match self.submit(request.now, request.token, operation) {
                None => pending += 1,
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    self.media_errors += 1;
                    failed.get_or_insert_with(|| status_of(request.sqe.opcode, &error));
                }
            }
        }
        if pending == 0 {
            return Flow::Done(failed.map_or(Outcome::OK, Outcome::failed));
        }
        Flow::Wait(Wait::Media(Operations { pending, failed, bytes: 0, format: None }))
    }

    /// Starts an operation without data. Returns its result if the medium finished it immediately.
    fn submit(
        &mut self,
        now: Nanos,
        token: u64,
        (index, kind, offset, len): (usize, MediaKind, u64, u64),
    ) -> Option<Result<(), MediaError>> {
        // Empty, but still from the pool, because media return it to the pool.
        let sg_list = self.spare.pop().unwrap_or_default();
        let fault = DataFault::None;
        let op = MediaOp { token, kind, offset, len, sg_list, placement: 0, fault };
        let done = self.namespaces[index].submit(op, now)?;
        self.spare.push(done.sg_list);
        Some(done.result)
    }

    /// Starts a flush of each namespace for a shutdown.
    pub(super) fn flush_all(&mut self, now: Nanos) {
        for index in 0..self.namespaces.len() {
            self.submit(now, SHUTDOWN_TOKEN, (index, MediaKind::Flush, 0, 0));
        }
    }

    /// Abandons everything in flight.
    pub(super) fn cancel(&mut self) {
        self.namespaces.iter_mut().for_each(Namespace::cancel);
    }

    /// Loses the contents of volatile caches, and everything in flight.
    pub(super) fn power_loss(&mut self) {
        self.namespaces.iter_mut().for_each(Namespace::power_loss);
    }

    /// Sets whether only the calling thread steps the controller from now on.
    pub(super) fn set_exclusive(&mut self, exclusive: bool) {
        self.namespaces.iter_mut().for_each(|namespace| namespace.set_exclusive(exclusive));
    }
}
