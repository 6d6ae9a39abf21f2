//! Signals as messages, so that devices are shut down and results reported.

#![allow(unsafe_code, reason = "the standard library has no signals")]

use std::mem::MaybeUninit;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};

use crate::terminal::say;

/// What asks a process to end, unless it is told to ignore it (SIGHUP, by nohup).
const SIGNALS: [(i32, &str); 3] =
    [(libc::SIGINT, "SIGINT"), (libc::SIGTERM, "SIGTERM"), (libc::SIGHUP, "SIGHUP")];

/// Whether the user asked us to end.
#[derive(Debug)]
pub(crate) struct Interrupt {
    asked: Receiver<i32>,
    /// There is something to shut down.
    orderly: Arc<OnceLock<()>>,
    seen: Option<i32>,
}

impl Interrupt {
    /// From now on SIGINT, SIGTERM and SIGHUP end this process with the exit code that shells give
    /// such an end: 128 and the signal's number. After [`Interrupt::orderly`] they do so only when
    /// they come a second time. And a file that would become larger than `ulimit -f` allows is an
    /// error, not a signal.
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
            for (signal, _) in SIGNALS {
                if signal != libc::SIGHUP || !is_ignored(signal) {
                    libc::sigaddset(signals.as_mut_ptr(), signal);
                }
            }
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
                    let name = SIGNALS.iter().find(|(number, _)| *number == signal);
                    let again = if asked_before { " again, and ended at once" } else { "" };
                    say(format_args!("interrupted by {}{again}", name.map_or("?", |it| it.1)));
                    std::process::exit(128 + signal);
                }
                if failed || ask.send(signal).is_err() {
                    break;
                }
                asked_before = true;
            }
        })?;
        Ok(Self { asked, orderly, seen: None })
    }

    /// From now on the first signal is only a message, because there are devices to shut down.
    pub(crate) fn orderly(&self) {
        self.orderly.get_or_init(|| ());
    }

    /// No one ever asks, and signals do what they always do.
    pub(crate) fn never() -> Self {
        Self { asked: mpsc::channel().1, orderly: Arc::default(), seen: None }
    }

    /// Whether the user asked.
    pub(crate) fn asked(&mut self) -> bool {
        self.seen = self.seen.or_else(|| self.asked.try_recv().ok());
        self.seen.is_some()
    }

    /// The exit code of what ended because the user asked: 128 and the signal's number.
    pub(crate) fn exit_code(&self) -> u8 {
        u8::try_from(128 + self.seen.unwrap_or(libc::SIGINT)).unwrap_or(u8::MAX)
    }
}

/// Returns whether whoever started this process had the signal ignored.
fn is_ignored(signal: i32) -> bool {
    let mut found = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action it is only written to `found`, and read if it was.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), found.as_mut_ptr()) == 0
            && found.assume_init_ref().sa_sigaction == libc::SIG_IGN
    }
}
