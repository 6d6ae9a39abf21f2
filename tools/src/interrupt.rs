//! Signals as messages, so that devices are shut down and results are reported.

#![allow(unsafe_code, reason = "the standard library has no signals")]

use std::mem::MaybeUninit;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::problem::EXIT_FAILED;
use crate::terminal::say;

/// Signals that end a process, unless it ignores them (SIGHUP, under nohup).
const SIGNALS: [(i32, &str); 3] =
    [(libc::SIGINT, "SIGINT"), (libc::SIGTERM, "SIGTERM"), (libc::SIGHUP, "SIGHUP")];

/// Time after a signal within which others are the same request.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Returns true if a signal is a request of its own, and not another delivery of the first one.
fn is_later(first: Instant, now: Instant) -> bool {
    now.saturating_duration_since(first) > SAME_REQUEST
}

/// Receiver of the user's interrupts.
#[derive(Debug)]
pub(crate) struct Interrupt {
    asked: Receiver<i32>,
    /// Set when there are devices to shut down.
    orderly: Arc<OnceLock<()>>,
    seen: Option<i32>,
}

impl Interrupt {
    /// Makes SIGINT, SIGTERM and SIGHUP end this process with the exit code that shells use: 128
    /// plus the signal's number. After [`Interrupt::orderly`], only a later one does that: programs
    /// such as timeout(1) send a signal twice, to the process and to its group. A write beyond
    /// `ulimit -f` becomes an error instead of a signal.
    ///
    /// Must be called before any other thread starts: threads inherit the signal mask.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let mut signals = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set; the other calls read or change it after that. No
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
            let mut first = None;
            loop {
                let mut signal = 0;
                // SAFETY: both pointers refer to variables of this frame.
                let failed = unsafe { libc::sigwait(&raw const signals, &raw mut signal) } != 0;
                let now = Instant::now();
                let is_again = match first {
                    Some(first) if !is_later(first, now) && !failed => continue,
                    first => first.is_some(),
                };
                if !failed && (is_again || has_begun.get().is_none()) {
                    let name = SIGNALS.iter().find(|(number, _)| *number == signal);
                    let again = if is_again { " again, and ended at once" } else { "" };
                    say(format_args!("interrupted by {}{again}", name.map_or("?", |it| it.1)));
                    std::process::exit(128 + signal);
                }
                if failed || ask.send(signal).is_err() {
                    break;
                }
                first.get_or_insert(now);
            }
        })?;
        Ok(Self { asked, orderly, seen: None })
    }

    /// Makes the first signal only a message, because there are devices to shut down.
    pub(crate) fn orderly(&self) {
        self.orderly.get_or_init(|| ());
    }

    /// Returns an interrupt that never fires; signals keep their default action.
    pub(crate) fn never() -> Self {
        Self { asked: mpsc::channel().1, orderly: Arc::default(), seen: None }
    }

    /// Returns an interrupt by these signals.
    #[cfg(test)]
    pub(crate) fn by(asked: Receiver<i32>) -> Self {
        Self { asked, ..Self::never() }
    }

    /// Returns true if the user has interrupted.
    pub(crate) fn asked(&mut self) -> bool {
        self.seen = self.seen.or_else(|| self.asked.try_recv().ok());
        self.seen.is_some()
    }

    /// Returns the exit code of a command that found everything right, or not, and may have been
    /// interrupted.
    pub(crate) fn end(&self, is_clean: bool, is_interrupted: bool) -> u8 {
        match (is_clean, is_interrupted) {
            (false, _) => EXIT_FAILED,
            (true, true) => self.exit_code(),
            (true, false) => 0,
        }
    }

    /// Returns the exit code after an interrupt: 128 plus the signal's number.
    pub(crate) fn exit_code(&self) -> u8 {
        u8::try_from(128 + self.seen.unwrap_or(libc::SIGINT)).unwrap_or(u8::MAX)
    }
}

/// Returns true if the parent process had the signal ignored.
fn is_ignored(signal: i32) -> bool {
    let mut found = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action, sigaction only writes `found`, which is read only on success.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), found.as_mut_ptr()) == 0
            && found.assume_init_ref().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_comes_twice_at_once_is_one_request() {
        let first = Instant::now();
        for (ms, later) in [(0, false), (10, false), (999, false), (1001, true), (60_000, true)] {
            assert_eq!(is_later(first, first + Duration::from_millis(ms)), later, "{ms} ms");
        }
    }
}
