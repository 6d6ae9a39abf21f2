//! Who runs the I/O kernel.

use std::sync::Arc;

use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::Clock;
use objstore::ExecutorFactory;

/// What runs the I/O kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Executor {
    /// Threads of their own.
    #[default]
    Host,
    /// The thread that calls the store.
    Inline,
}

type Made = Result<Box<dyn IoExecutor>, ExecutorError>;

impl Executor {
    /// Makes executors of this kind.
    #[must_use]
    pub fn factory(self, clock: &Arc<dyn Clock>) -> ExecutorFactory {
        let clock = clock.clone();
        match self {
            Self::Host => Box::new(move || -> Made {
                Ok(Box::new(HostExecutor::new(HostOptions::default(), clock.clone())))
            }),
            Self::Inline => {
                Box::new(move || -> Made { Ok(Box::new(InlineExecutor::new(clock.clone()))) })
            }
        }
    }
}
