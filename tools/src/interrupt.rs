//! Ctrl-C as a message, so that devices are shut down and results reported.

#![allow(unsafe_code, reason = "the standard library has no signals")]

use std::mem::MaybeUninit;
use std::sync::mpsc::{self, Receiver};

use crate::problem::EXIT_INTERRUPTED;

/// Tells whether somebody asked us to end.
#[derive(Debug)]
pub(crate) struct Interrupt {
    asked: Receiver<()>,
    seen: bool,
}

impl Interrupt {
    /// From now on SIGINT and SIGTERM end this process only when they come a second time.
    ///
    /// To be called before any other thread starts: threads inherit what is blocked here.
    ///
    /// # Errors
    /// When the thread that waits for signals cannot be started.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let mut signals = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set, and the others read or change it after that.
        let signals = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
            signals.assume_init()
        };
        let (ask, asked) = mpsc::channel();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for count in 0.. {
                let mut signal = 0;
                // SAFETY: both point to values of this frame.
                let failed = unsafe { libc::sigwait(&raw const signals, &raw mut signal) } != 0;
                if count > 0 && !failed {
                    std::process::exit(i32::from(EXIT_INTERRUPTED));
                }
                if failed || ask.send(()).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { asked, seen: false })
    }

    /// Nobody ever asks, and signals do what they always do.
    pub(crate) fn never() -> Self {
        Self { asked: mpsc::channel().1, seen: false }
    }

    /// Whether somebody asked.
    pub(crate) fn asked(&mut self) -> bool {
        self.seen |= self.asked.try_recv().is_ok();
        self.seen
    }
}
