//! The kernel's threads against the thread of the ring, the driver and the controllers: for
//! ThreadSanitizer (`cargo xtask sanitize thread`).
//!
//! The standard library is not instrumented. Where threads wait for each other in one of its locks,
//! or in libtest, ThreadSanitizer sees no order, and reports races that there are not. Here nothing
//! of the kind is shared: whoever waits steps the controllers, and the tests are run one after the
//! other by the main thread.

#[path = "stack/rig.rs"]
mod rig;

use std::sync::Arc;

use gio_kernels::{HostExecutor, HostOptions};
use gio_uring::UringOptions;
use libtest_mimic::{Arguments, Trial};
use nvme_driver::{Clock, MonotonicClock, Nanos};
use nvme_emu::{Emu, EmuDomain};
use rig::{Stack, lost_command, round_trip};
use ripieno_testkit::{Drives, memory_drives};

/// Real time. Whoever waits steps the controllers.
#[derive(Debug)]
struct Stepping {
    time: MonotonicClock,
    emus: Vec<Arc<Emu>>,
}

impl Clock for Stepping {
    fn now(&self) -> Nanos {
        self.time.now()
    }

    fn pause(&self, _idle: u32, _until: Nanos) {
        for emu in &self.emus {
            emu.step(self.now(), u32::MAX);
        }
        std::thread::yield_now();
    }
}

fn stack(devices: usize, parts: usize, depth: u32) -> Stack {
    let domain = EmuDomain::new("races");
    let emu = |config| Emu::new(domain.clone(), config).expect("a valid configuration");
    let emus: Vec<_> = memory_drives(devices, 64 << 20, 4096).into_iter().map(emu).collect();
    let clock = Stepping { time: MonotonicClock::default(), emus: emus.clone() };
    let drives = Drives { domain: domain.clone(), emus, clock: Arc::new(clock), runner: None };
    Stack::over(drives, parts, depth)
}

fn executor(stack: &Stack, threads: usize) -> Box<HostExecutor> {
    let options = HostOptions { threads: Some(threads) };
    Box::new(HostExecutor::new(options, stack.drives.clock.clone()))
}

fn main() {
    let moved = Trial::test("kernel_threads_move_the_right_bytes", || {
        for (devices, parts, threads) in [(1, 1, 1), (2, 2, 2), (1, 2, 2)] {
            let stack = stack(devices, parts, 32);
            let executor = executor(&stack, threads);
            round_trip(stack, executor, UringOptions::default());
        }
        Ok(())
    });
    let lost = Trial::test("a_lost_command_is_recovered_from", || {
        let stack = stack(1, 1, 64);
        let executor = executor(&stack, 1);
        lost_command(stack, executor, false);
        Ok(())
    });
    let args = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&args, vec![moved, lost]).exit();
}
