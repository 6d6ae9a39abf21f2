//! Ctrl-C as a message, so that devices are shut down and results reported.

#![allow(unsafe_code, reason = "the standard library has no signals")]

use std::mem::MaybeUninit;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};

use crate::problem::EXIT_INTERRUPTED;

/// Whether the user asked us to end.
#[derive(Debug)]
pub(crate) struct Interrupt {
    asked: Receiver<()>,
    /// There is something to shut down.
    orderly: Arc<OnceLock<()>>,
    seen: bool,
}

impl Interrupt {
    /// From now on SIGINT and SIGTERM end this process with [`EXIT_INTERRUPTED`]; after
    /// [`Interrupt::orderly`] only when they come a second time. And a file that would become
    /// larger than `ulimit -f` allows is an error, not a signal.
    ///
    /// To be called before any other thread starts: threads inherit what is blocked here.
    ///
    /// # Errors
    /// When the thread that waits for signals cannot be started.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let mut signals = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set, and the others read or change it after that. No
        // handler is installed.
        let signals = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
            signals.assume_init()
        };
        let (ask, asked) = mpsc::channel();
        let orderly = Arc::new(OnceLock::new());
        let has_begun = orderly.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            let mut asked_before = false;
            loop {
                let mut signal = 0;
                // SAFETY: both point to values of this frame.
                let failed = unsafe { libc::sigwait(&raw const signals, &raw mut signal) } != 0;
                if !failed && (asked_before || has_begun.get().is_none()) {
                    std::process::exit(i32::from(EXIT_INTERRUPTED));
                }
                if failed || ask.send(()).is_err() {
                    break;
                }
                asked_before = true;
            }
        })?;
        Ok(Self { asked, orderly, seen: false })
    }

    /// From now on the first signal is only a message, because there are devices to shut down.
    pub(crate) fn orderly(&self) {
        self.orderly.get_or_init(|| ());
    }

    /// No one ever asks, and signals do what they always do.
    pub(crate) fn never() -> Self {
        Self { asked: mpsc::channel().1, orderly: Arc::default(), seen: false }
    }

    /// Whether the user asked.
    pub(crate) fn asked(&mut self) -> bool {
        self.seen |= self.asked.try_recv().is_ok();
        self.seen
    }
}
