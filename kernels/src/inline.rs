#![allow(unsafe_code, reason = "runs the kernel on memory that the ring laid out")]
//! Runs every warp in turn on the caller's thread.

use std::sync::Arc;

use gio_uring::{ExecutorError, IoExecutor, Progress, SharedMemory, abi::Args};
use nvme_driver::{Clock, GrantEpoch, Nanos, Place, Quiesced, Waiter};

use crate::{ffi, memory};

/// Name in reports.
const NAME: &str = "inline";

/// Runs the I/O kernel inside [`IoExecutor::poll`], on the caller's thread: no threads, and with a
/// simulated clock deterministic.
#[derive(Debug)]
pub struct InlineExecutor {
    clock: Arc<dyn Clock>,
    args: Option<Args>,
    grants: Vec<GrantEpoch>,
}

impl InlineExecutor {
    /// Creates an executor; [`IoExecutor::start`] starts it. `clock` must be the ring's clock: the
    /// deadline of [`IoExecutor::stop`] is measured with it, and the controller runs during its
    /// pauses.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, args: None, grants: Vec::new() }
    }

    /// Runs every warp once.
    fn turn(&mut self) -> Result<u32, ExecutorError> {
        let Some(args) = &self.args else {
            let cause = "it was not started, or stopped; start it (again)".into();
            return Err(ExecutorError::Failed { executor: NAME, cause });
        };
        // SAFETY: the caller of `start` promised that everything `args` points to lives until
        // `stop` succeeds, which clears them; `&mut self` excludes other threads.
        Ok(unsafe { ffi::run(args, 0, args.warp_count) })
    }
}

impl IoExecutor for InlineExecutor {
    fn name(&self) -> &'static str {
        NAME
    }

    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        memory::alloc(NAME, len)
    }

    fn address(&self, place: &Place) -> Option<u64> {
        place.host
    }

    fn start(&mut self, args: Args, grants: &[GrantEpoch]) -> Result<(), ExecutorError> {
        if self.args.is_some() {
            let cause = "it is running already; stop it first".into();
            return Err(ExecutorError::Failed { executor: NAME, cause });
        }
        self.args = Some(args);
        self.grants = grants.to_vec();
        Ok(())
    }

    /// Starts nothing: the next [`IoExecutor::poll`] does the work.
    fn submitted(&mut self, _tail: u32, _sms: u32) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn poll(&mut self) -> Result<Progress, ExecutorError> {
        let moved = self.turn()? & ffi::RUN_MOVED != 0;
        Ok(if moved { Progress::Moved } else { Progress::Idle })
    }

    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError> {
        let clock = self.clock.clone();
        let mut waiter = Waiter::new(&*clock, deadline);
        while self.args.is_some() {
            let result = self.turn()?;
            if result & ffi::RUN_FINISHED != 0 {
                self.args = None;
            } else if result & ffi::RUN_MOVED != 0 {
                waiter.moved();
            } else if !waiter.wait() {
                return Err(ExecutorError::StopTimeout { executor: NAME });
            }
        }
        // SAFETY: only `turn` uses the grants, and it has no arguments any more.
        Ok(unsafe { Quiesced::assert(std::mem::take(&mut self.grants)) })
    }
}
