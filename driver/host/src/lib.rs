//! Userspace NVMe driver: brings a controller up, keeps it healthy, and grants its I/O queues to
//! executors, which build the commands (host threads or a GPU kernel).
//!
//! # Architecture
//!
//! ```text
//!   Controller    state machine: attach, reset, shutdown          controller
//!    |- admin     one admin command at a time, events beside       admin, command, health
//!    |- block     blocking read, write, flush, deallocate          block, io
//!    |- passthrough   commands that the driver knows nothing of     passthrough
//!    |- grants    queue pairs for executors                        grant (plain data), grants
//!    '- recovery  Abort -> delete queue -> controller reset        recovery
//!   QueuePair     post, update_tail, reap; CID table               queue, cid
//!   describe      PRP lists and SGLs                               descriptor
//!   Bus, DmaSpace, Clock    the seams to hardware and time         bus, dma, clock
//!   CopyEngine    the seam to a GPU's copies                       copy
//!   platform      all unsafe code                                  platform
//! ```
//!
//! The implementation of [`Bus`] decides whether this is a PCIe function or the software
//! controller, that of [`Clock`] whether deadlines are real time or virtual time.
//!
//! Before anything is built on a piece of memory, it is shown that the controller reaches it:
//! [`platform::p2p::prove`] tries all uses of memory that this process addresses and leaves the
//! medium as it was; [`platform::p2p::round_trip`] sends known data to the drive and back, also
//! from memory that only a GPU addresses ([`CopyEngine`]), and overwrites some blocks.
//!
//! # Invariants
//!
//! - Every wait has a deadline: CAP.TO or CRTO for enabling, RTD3E for a shutdown, the options'
//!   timeouts for commands. While waiting, CSTS is read now and then: a dead controller is noticed
//!   early, and the time that one has paused does not count.
//! - A reset has two attempts: CC.EN alone, then behind a reset of the function. The NVM subsystem
//!   is reset on request only ([`Controller::reset_subsystem`]).
//! - A command that failed is sent again at most four times, when its status says that this may
//!   help; a Flush never, for the second one would not cover what the first one lost.
//! - What a device says is checked before it is used. A lie is an [`Error`] that moves the
//!   controller to [`State::Failed`], never a panic and never an endless loop.
//! - Memory a device was told about is freed only after the queue that names it was deleted or
//!   CSTS.RDY became 0. Memory an executor was granted is freed only against a [`Quiesced`]. Where
//!   neither can be had, it is leaked and an error is logged.
//! - A CID carries a generation; an unknown or late one is noticed.
//! - No Rust reference to device-visible memory exists; all accesses are in [`platform`].
//! - [`queue::QueuePair`] allocates nothing on post and reap.
//!
//! # Not implemented
//!
//! Metadata and protection information, namespace management, multi-path, weighted round robin,
//! controller memory buffers, power states, persistent event log (what of these is a command of its
//! own can be passed through). Only PCI vendor and device choose a row of [`quirks`]. The feature
//! `vfio` has the bus of PCIe functions; the software controller's bus is in nvme-emu.

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
mod grant;
mod grants;
mod health;
mod info;
mod io;
mod namespace;
mod options;
mod passthrough;
mod placement;
pub mod platform;
pub mod queue;
pub mod quirks;
mod rate;
mod recovery;
mod resets;
mod wait;

pub use block::WriteOptions;
pub use bus::{Bus, DoorbellPage, Gone, Interrupt, InterruptError, ResetError};
pub use cid::DEPTH_MAX;
pub use clock::{Clock, MonotonicClock, Nanos, Waiter, wait_until};
pub use controller::{Controller, State};
pub use copy::{CopyDirection, CopyEngine, CopyError, CopyFence, DeviceCopy};
pub use dma::{
    DevicePtr, DmaError, DmaMemory, DmaSlice, DmaSpace, ExternalMemory, Iova, IovaRange, Place,
};
pub use error::{CommandId, Error, FailCause, TimeoutOutcome};
pub use grant::{DescriptorMode, GrantEpoch, PLACEMENTS_MAX, QueueGrant, Quiesced};
pub use grants::QueueMemory;
pub use health::ControllerEvent;
pub use info::{Capabilities, ControllerInfo, DsmLimits};
pub use namespace::{LbaRange, NamespaceError, NamespaceInfo};
pub use options::{ControllerOptions, DescriptorPreference, WaitMode};
pub use passthrough::PassthroughData;
pub use recovery::{Recovered, RecoveryLevel};
pub use resets::ResetCount;
