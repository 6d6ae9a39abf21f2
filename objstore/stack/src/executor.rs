//! Executors of the I/O kernel.

use std::{fmt, sync::Arc};

use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::Clock;
use objstore::ExecutorFactory;

use crate::{
    error::StackError,
    gpu::{CudaChoice, Gpu},
};

/// The executor of the I/O kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Executor {
    /// The file executor, for a store in files: no controllers are between them and the store.
    File,
    /// Host threads.
    #[default]
    Host,
    /// The thread that calls the store.
    Inline,
    /// A GPU.
    Cuda(CudaChoice),
}

type Made = Result<Box<dyn IoExecutor>, ExecutorError>;

impl Executor {
    /// Returns the default number of queue pairs per device. On a GPU the warp of a queue computes
    /// the checksums of what it moves, at less than the bandwidth of a current drive.
    #[must_use]
    pub const fn queues(self) -> u16 {
        match self {
            Self::File | Self::Host | Self::Inline => 1,
            Self::Cuda(_) => 4,
        }
    }

    /// Opens the GPU, if one is used: before anything else is built.
    ///
    /// # Errors
    /// Returns [`StackError::Cuda`] if there is no driver, no such GPU, or too few resources on it.
    pub fn gpu(self) -> Result<Option<Arc<Gpu>>, StackError> {
        match self {
            Self::File | Self::Host | Self::Inline => Ok(None),
            Self::Cuda(choice) => Ok(Some(Gpu::open(choice)?)),
        }
    }

    /// Returns a factory for executors of this kind, on the opened GPU. That of
    /// [`Executor::File`] needs the files, which only [`crate::Builder`] has, and fails.
    #[must_use]
    pub fn factory(self, clock: &Arc<dyn Clock>, gpu: Option<&Arc<Gpu>>) -> ExecutorFactory {
        let clock = clock.clone();
        match (self, gpu.cloned()) {
            (Self::File, _) => Box::new(|| -> Made {
                let cause = "it is for a store in files".to_owned();
                Err(ExecutorError::Failed { executor: "file", cause })
            }),
            (Self::Host, _) => Box::new(move || -> Made {
                Ok(Box::new(HostExecutor::new(HostOptions::default(), clock.clone())))
            }),
            (Self::Inline, _) => {
                Box::new(move || -> Made { Ok(Box::new(InlineExecutor::new(clock.clone()))) })
            }
            (Self::Cuda(choice), gpu) => Box::new(move || -> Made {
                let gpu = gpu.clone().map_or_else(|| Gpu::open(choice), Ok)?;
                Ok(Box::new(gpu.executor(choice, clock.clone())?))
            }),
        }
    }
}

impl fmt::Display for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Host => "host",
            Self::Inline => "inline",
            Self::Cuda(_) => "cuda",
        })
    }
}
