//! Why a store cannot be built.

use std::io;

use nvme_driver::DmaError;
use nvme_emu::EmuError;
use objstore::{Layer, RegistrationError, StoreError};

use crate::home::HomeError;

/// What is in the way. The message says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// The home.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A software controller.
    #[error("making a software controller: {0}")]
    Emu(#[from] EmuError),
    /// The threads of the software controllers.
    #[error(
        "starting the software controllers' threads: {0}; allow more threads (ulimit -u), or use \
         fewer devices"
    )]
    Threads(io::Error),
    /// The driver does not get on with a controller.
    #[error("attaching to {device}: {source}")]
    Attach {
        /// The device.
        device: String,
        /// Why not.
        source: nvme_driver::Error,
    },
    /// A controller does not shut down.
    #[error("shutting {device} down: {source}")]
    Shutdown {
        /// The device.
        device: String,
        /// Why not.
        source: nvme_driver::Error,
    },
    /// The memory of the KV pool cannot be mapped for the devices.
    #[error("mapping the KV pool: {0}")]
    Memory(#[from] DmaError),
    /// The KV pool's layout is not one.
    #[error("registering the KV pool: {0}")]
    Pool(#[from] RegistrationError),
    /// The part of the pool that requests are copied through is in use.
    #[error(
        "{wanted} blocks are to be copied through bounce buffers, and {free} of {all} are free; \
         end a request first, or ask for fewer blocks at a time"
    )]
    Bounce {
        /// Blocks of the request.
        wanted: usize,
        /// Blocks of bounce buffers that no request uses.
        free: usize,
        /// Blocks of bounce buffers there are.
        all: usize,
    },
    /// A layer that was not started, or that was waited for.
    #[error("layer {layer} of this request is not in flight; start it before you wait for it")]
    NotStarted {
        /// The layer.
        layer: Layer,
    },
    /// A request of the other direction.
    #[error("this request retrieves blocks, and only one that stores them can be committed")]
    NotWriting,
}
