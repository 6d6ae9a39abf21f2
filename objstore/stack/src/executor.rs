//! Who runs the I/O kernel.

use std::sync::Arc;

use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::Clock;
use objstore::ExecutorFactory;

use crate::{
    error::StackError,
    gpu::{CudaChoice, Gpu},
};

/// What runs the I/O kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Executor {
    /// Threads of their own.
    #[default]
    Host,
    /// The thread that calls the store.
    Inline,
    /// A GPU.
    Cuda(CudaChoice),
}

type Made = Result<Box<dyn IoExecutor>, ExecutorError>;

impl Executor {
    /// The GPU, if one takes part: opened before anything else is built.
    ///
    /// # Errors
    /// [`StackError::Cuda`] when there is no driver, no such GPU, or not enough of it.
    pub fn gpu(self) -> Result<Option<Arc<Gpu>>, StackError> {
        match self {
            Self::Host | Self::Inline => Ok(None),
            Self::Cuda(choice) => Ok(Some(Gpu::open(choice)?)),
        }
    }

    /// Makes executors of this kind, on the GPU that was opened.
    #[must_use]
    pub fn factory(self, clock: &Arc<dyn Clock>, gpu: Option<&Arc<Gpu>>) -> ExecutorFactory {
        let clock = clock.clone();
        match (self, gpu.cloned()) {
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
