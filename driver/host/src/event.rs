//! Events that a controller or its bus reports.

use nvme_spec::{
    admin::AsyncEvent,
    ids::{Nsid, QueueId},
    log::CriticalWarning,
};

/// An event reported by a controller or its bus.
///
/// Death of a controller is not an event: [`crate::Controller::poll_events`] fails instead.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControllerEvent {
    /// An error that belongs to no command; the error log has details.
    Error {
        /// Type of error (Base, "Asynchronous Event Information - Error Status").
        info: u8,
    },
    /// The health of the controller changed.
    Health {
        /// Type of change (Base, "Asynchronous Event Information - SMART / Health Status").
        info: u8,
        /// Current critical warnings. With [`CriticalWarning::READ_ONLY`], writes fail from now on.
        warnings: CriticalWarning,
    },
    /// Namespaces appeared, went away or changed. [`crate::Controller::namespaces`] is up to date.
    NamespacesChanged {
        /// The changed namespaces. Empty if there are too many to list.
        nsids: Vec<Nsid>,
        /// Queues whose grant no longer matches its namespace: the size or the LBA size changed, or
        /// it is gone. Stop their executor, recover, and grant them again.
        stale: Vec<QueueId>,
    },
    /// New firmware is being activated; commands may take longer.
    FirmwareActivating,
    /// The controller paused command processing (CSTS.PP).
    Paused,
    /// The controller processes commands again.
    Resumed,
    /// The platform wants the device back ([`crate::Bus::requested`]): shut it down and drop it.
    Requested,
    /// An uncorrectable PCIe error ([`crate::Bus::pcie_error`]): data may be lost, and the link may
    /// be down. Stop the executors, reset the controller, which waits for the link, and check what
    /// is left. Other events are reported after that.
    PcieError,
    /// Any other event.
    Other(AsyncEvent),
}

impl ControllerEvent {
    /// Returns the event's name, for interfaces in other languages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Error { .. } => "error",
            Self::Health { .. } => "health",
            Self::NamespacesChanged { .. } => "namespaces-changed",
            Self::FirmwareActivating => "firmware-activating",
            Self::Paused => "paused",
            Self::Resumed => "resumed",
            Self::Requested => "requested",
            Self::PcieError => "pcie-error",
            Self::Other(_) => "other",
        }
    }
}

/// State already reported by [`crate::Controller::poll_events`].
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) paused: bool,
    pub(crate) requested: bool,
    /// Set until the function was reset.
    pub(crate) pcie_error: bool,
}
