//! A software NVMe controller, complete enough to run the real driver, the I/O kernels and the
//! object store against it unchanged, also under load and with faults.
//!
//! # Architecture
//!
//! ```text
//!   nvme_driver::Bus  <- Emu { Mutex<Controller>, Doorbells, Interrupts, EmuDomain }
//!                         ^ step(now, budget)        EmuRunner (threads) or SimClock
//!   Controller: registers, admin, queues, PRP/SGL walkers  ->  GpuCopies -> Overlay -> Media
//!   EmuDomain:  IOVA -> memory, the software IOMMU                MemoryMedia, FileMedia, SimMedia
//! ```
//!
//! - [`Controller`](controller::Controller) is a step machine: no threads, no clock of its own, and
//!   I/O only through [`Media`]. Its caller passes the time.
//! - [`EmuDomain`] is the address space: it translates, refuses, counts, and keeps memory alive.
//! - [`EmuRunner`] drives controllers with threads in real time; [`SimClock`] drives the whole
//!   stack on one thread in virtual time, reproducible from a seed.
//! - Memory that only a GPU can address ([`EmuDomain::with_copies`]) may hold data of reads and
//!   writes. It passes through bounce buffers in this process, so that overlay and media are the
//!   same for all memory. A GPU copies it, in one batch for everything ready in a step, and a
//!   command completes after its copies (`media/gpu_copies.rs`, `bounce.rs`).
//! - [`FaultPlan`] is data. `fault.rs` decides which rule fires, `controller/execute.rs` injects
//!   faults of commands, `controller/lifecycle.rs` those of registers, and the `Overlay` those of
//!   bytes; the media below stay pristine. `progress.rs` has the counters.
//! - [`SimMedia`] loses the contents of a volatile cache on power loss, and has its own faults
//!   ([`SimFaults`]): operations that fail, and silent corruption. A [`PowerSwitch`] cuts the power
//!   of several controllers together, at a moment that can be enumerated; the bytes below survive.
//! - [`BandwidthMedia`] gives another medium the speed of a drive, in virtual time.
//!
//! # Invariants
//!
//! - Device memory is accessed only through a [`DmaAccess`], and asynchronously only through
//!   [`SgList`], which keep the memory allocated until the medium returns them.
//! - I/O virtual addresses are never reused and never adjacent, so a stale or overlong access is
//!   refused instead of reaching another buffer.
//! - A reset and a power loss cancel media operations and do not wait: CSTS.RDY stays 1 until media
//!   use no memory any more. I/O on the host's disk and a GPU's copies cannot be aborted.
//! - A command with data on a GPU completes after the fence of its copies. Until then the GPU's
//!   memory and the bounce buffers stay allocated. A failed copy ends its command with Data
//!   Transfer Error; a lost GPU then sets CSTS.CFS.
//! - Lock order: an [`Emu`]'s own lock, then the domain's. No emu lock is taken while holding a
//!   [`DmaAccess`], and no mapped memory is dropped by a thread that holds one.
//!
//! # Not implemented
//!
//! - Queues, PRP lists, SGL segments, and data of commands other than reads and writes in memory
//!   that only a GPU can address: refused ([`DmaFaultKind::DeviceOnly`]).
//! - Virtual time for a GPU: with [`SimClock`] and a real copy engine, 10 us pass per poll of a
//!   fence, and runs are not reproducible. With a deterministic engine they are.
//! - Per-namespace feature values (Error Recovery is shared by all).
//! - Of Flexible Data Placement: changing the configuration, more than one reclaim group, the other
//!   log pages, events, I/O Management Send, and the directive commands. Reclaim units are always
//!   reported as empty.
//! - Metadata, end-to-end protection, zoned namespaces, controller memory buffers.

pub mod controller;

mod bounce;
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
    Bandwidth, BandwidthDial, BandwidthMedia, DataFault, FileMedia, FileOptions, Latency, Media,
    MediaDone, MediaError, MediaKind, MediaOp, MemoryMedia, SimFault, SimFaultKind, SimFaultLog,
    SimFaults, SimMedia, SimOptions,
};
pub use power::PowerSwitch;
pub use progress::{EmuCounters, Progress};
pub use runner::EmuRunner;
pub use sim::SimClock;
