//! Userspace NVMe driver: attaches to a controller, keeps it healthy, and grants its I/O queues to
//! executors, which build the commands (host threads or a GPU kernel).
//!
//! # Architecture
//!
//! ```text
//!   Controller    state machine: attach, reset, shutdown             controller, state
//!    |- commands  identify, logs, features, format, events            command, event, placement
//!    |- block     blocking read, write, flush, deallocate             block
//!    '- grants    queue pairs for executors; their recovery           grants, grant (plain data)
//!   Admin         one admin command at a time; Abort, abandonment     admin
//!   HostQueue     the driver's own queue: splits, retries             io
//!   Port          registers, memory, clock and name; waits            port, wait
//!   QueuePair     post, update_tail, reap; CID table                  queue, cid
//!   Bus, DmaSpace, Clock    interfaces to hardware and time           bus, dma, clock
//!   CopyEngine    interface to a GPU's copies                         copy
//!   platform      all unsafe code                                     platform
//! ```
//!
//! The implementation of [`Bus`] decides whether this is a PCIe function or the software
//! controller, that of [`Clock`] whether deadlines are in real or virtual time.
//!
//! Before a piece of memory is used, a test proves that the controller can access it:
//! [`platform::p2p::prove`] tries all uses of memory that is mapped in this process and leaves the
//! medium unchanged; [`platform::p2p::round_trip`] sends known data to the drive and back, also
//! from memory that only a GPU can address ([`CopyEngine`]), and overwrites some blocks.
//!
//! # Invariants
//!
//! - Every wait has a deadline: CAP.TO or CRTO for enabling, RTD3E for a shutdown, the options'
//!   timeouts for commands. Waits read CSTS periodically, so a dead controller is detected early;
//!   pauses of the controller do not count.
//! - A reset has two attempts: CC.EN alone, then after a reset of the function. The NVM subsystem
//!   is reset on request only ([`Controller::reset_subsystem`]).
//! - A failed command is retried at most four times, if its status allows. A Flush is never
//!   retried, because the second one would not cover the data lost by the first.
//! - Everything a device reports is validated before use. A violation is an [`Error`] that moves
//!   the controller to [`State::Failed`], never a panic and never an endless loop.
//! - Memory known to a device is freed only after the queue that refers to it was deleted or
//!   CSTS.RDY became 0. Memory of a grant is freed only in exchange for a [`Quiesced`]. If neither
//!   is possible, the memory is leaked and an error is logged.
//! - A CID carries a generation, which exposes unknown and late completions.
//! - No Rust reference to device-visible memory exists; all accesses are in [`platform`].
//! - [`queue::QueuePair`] allocates nothing on post and reap.
//!
//! # Not implemented
//!
//! Command sets other than NVM, metadata and protection information, namespace management,
//! multi-path, reservations, weighted round robin, controller memory buffers, power states,
//! persistent event log, passthrough of commands unknown to the driver. Only PCI vendor and device
//! select a row of [`quirks`]. The feature `vfio` adds the bus of PCIe functions; the software
//! controller's bus is in nvme-emu.

mod admin;
mod block;
mod bus;
mod cid;
mod clock;
mod command;
mod controller;
mod copy;
pub mod descriptor;
mod dma;
mod error;
mod event;
mod grant;
mod grants;
mod info;
mod io;
mod namespace;
mod options;
mod placement;
pub mod platform;
mod port;
pub mod queue;
pub mod quirks;
mod rate;
mod remark;
mod state;
mod wait;

pub use block::WriteOptions;
pub use bus::{Bus, DoorbellPage, Gone, Interrupt, InterruptError, ResetError};
pub use cid::DEPTH_MAX;
pub use clock::{Clock, MonotonicClock, Nanos, Waiter, join, wait_until};
pub use controller::Controller;
pub use copy::{CopyDirection, CopyEngine, CopyError, CopyFence, DeviceCopy};
pub use dma::{
    DevicePtr, DmaError, DmaMemory, DmaSlice, DmaSpace, ExternalMemory, Iova, IovaRange, Place,
};
pub use error::{CommandId, Error, FailCause, TimeoutOutcome, remedy, status_of};
pub use event::ControllerEvent;
pub use grant::{
    DescriptorMode, GrantEpoch, PLACEMENTS_MAX, Placements, QueueGrant, QueueMemory, Quiesced,
    Recovered, RecoveryLevel,
};
pub use info::{Capabilities, ControllerInfo, DsmLimits};
pub use namespace::{LbaRange, NamespaceError, NamespaceInfo};
pub use nvme_pci::{Use, users_of_disk};
pub use options::{ControllerOptions, DescriptorPreference, WaitMode};
pub use rate::RateLimit;
pub use remark::Remark;
pub use state::{ResetCount, State};
pub use wait::retry_delay;
