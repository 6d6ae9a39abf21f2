//! A software NVMe controller, complete enough that the real driver, the I/O kernels and the object
//! store run against it unchanged, and as real ones are under load and with faults.
//!
//! # Architecture
//!
//! ```text
//!   nvme_driver::Bus  <- EmuBus -> Emu { Mutex<Controller>, Doorbells, Interrupts, EmuDomain }
//!                                     ^ step(now, budget)        EmuRunner (threads) or SimClock
//!   Controller: registers, admin, queues, PRP/SGL walkers  ->  GpuCopies -> Overlay -> Media
//!   EmuDomain:  IOVA -> memory, the software IOMMU                MemoryMedia, FileMedia, SimMedia
//! ```
//!
//! - [`Controller`](controller::Controller) is a step machine: no threads, no clock of its own, no
//!   I/O but through [`Media`]. Its caller says what time it is.
//! - [`EmuDomain`] is the address space: it translates, refuses, counts, and keeps memory alive.
//! - [`EmuRunner`] drives controllers with threads in real time; [`SimClock`] drives the whole
//!   stack on one thread in virtual time, repeatable from a seed.
//! - Memory that only a GPU addresses ([`EmuDomain::with_copies`]) takes data of reads and writes.
//!   Its bytes go through memory of this process, so that overlay and media are the same for all
//!   memory; a GPU copies them, one batch for all that is ready in a step, and a command completes
//!   after its copies (`media/gpu_copies.rs`, `bounce.rs`).
//! - [`FaultPlan`] is data. Commands and registers misbehave in the controller, bytes in the
//!   `Overlay`; the media below stay pristine.
//! - [`SimMedia`] loses what power loss takes from a volatile cache, and has faults of its own
//!   ([`SimFaults`]): operations that fail, and some that no command shows. A [`PowerSwitch`] cuts
//!   the power of several controllers at once, at a moment that can be counted and chosen; the
//!   bytes below outlive them.
//! - [`BandwidthMedia`] over another medium is as fast as a drive, in virtual time. [`FtlMedia`]
//!   counts what a drive's flash translation layer would write.
//!
//! # Invariants
//!
//! - Device memory is reached only through a [`DmaAccess`], and moved asynchronously only through
//!   [`SgList`], which keep the memory allocated until the medium gives them back.
//! - I/O virtual addresses are never reused and never neighbours, so a stale or overlong access is
//!   a refused access and not another buffer's bytes.
//! - A reset and a power loss cancel what media do, and do not wait: CSTS.RDY stays 1 until media
//!   use no memory any more. A host's disk and a GPU's copies cannot be called back.
//! - A command with data on a GPU completes after the fence of its copies. Until then the GPU's
//!   memory and the memory in between stay allocated. A copy that fails ends its command with Data
//!   Transfer Error; a lost GPU is then CSTS.CFS.
//! - Lock order: an [`Emu`]'s own lock, then the domain's. Nothing takes an emu lock while it holds
//!   a [`DmaAccess`], and no mapped memory is dropped by a thread that holds one.
//!
//! # Not implemented
//!
//! - Queues, PRP lists, SGL segments, and data of commands other than reads and writes in memory
//!   that only a GPU addresses: refused ([`DmaFaultKind::DeviceOnly`]).
//! - Virtual time for a GPU: with [`SimClock`] and a real copy engine, 10 us pass for each poll of
//!   a fence, and runs are not repeatable. With an engine that is repeatable they are.
//! - Feature values of their own for each namespace (Error Recovery is one for all).
//! - Of Flexible Data Placement: changing the configuration, more than one reclaim group, the other
//!   log pages, events, I/O Management Send, and the directive commands. Reclaim units are always
//!   reported as empty.
//! - Metadata, end-to-end protection, zoned namespaces, controller memory buffers.

pub mod controller;

mod bounce;
mod bus;
mod config;
mod domain;
mod doorbell;
mod emu;
mod fault;
mod interrupt;
pub mod media;
mod memory;
mod power;
mod progress;
mod random;
mod runner;
mod sg_list;
mod sim;

pub use bus::EmuBus;
pub use config::{ConfigError, EmuConfig, NamespaceConfig, PlacementConfig, SglSupport};
pub use domain::{DmaAccess, DmaFault, DmaFaultKind, EmuDomain, SgEntry, SgList};
pub use doorbell::Doorbells;
pub use emu::{Emu, EmuError};
pub use fault::{
    FaultAction, FaultPlan, FaultRule, FaultWhen, IdentifyOverrides, IdentifyPatch, LbaRange,
    RegisterFaults,
};
pub use interrupt::Interrupts;
pub use media::{
    Bandwidth, BandwidthDial, BandwidthMedia, DataFault, FileMedia, FileOptions, FtlCounters,
    FtlMedia, FtlMeter, FtlOptions, Latency, Media, MediaDone, MediaError, MediaKind, MediaOp,
    MemoryMedia, SimFault, SimFaultKind, SimFaultLog, SimFaults, SimMedia, SimOptions,
};
pub use power::PowerSwitch;
pub use progress::{EmuCounters, Progress};
pub use runner::EmuRunner;
pub use sim::SimClock;
