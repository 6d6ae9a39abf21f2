//! The deadline of a run, and the end of the running step.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// CI kills a run later than this, but without naming the step that hung.
const CI_MINUTES: u64 = 85;

/// `None` for no limit: a user at a terminal has Ctrl-C.
#[derive(Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    pub fn new(minutes: Option<u64>, in_ci: bool) -> Self {
        let minutes = minutes.or(in_ci.then_some(CI_MINUTES));
        Self(minutes.map(|m| Instant::now() + Duration::from_secs(60 * m)))
    }

    pub fn after(timeout: Duration) -> Self {
        Self(Some(Instant::now() + timeout))
    }

    pub const fn never() -> Self {
        Self(None)
    }

    pub fn is_set(self) -> bool {
        self.0.is_some()
    }

    /// Starts a watch on `group`, a child that leads its own process group.
    ///
    /// It kills the whole group: a hung test is a grandchild, which would keep our pipe open.
    pub fn watch(self, group: u32) -> Watch {
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = self.0.map(|at| {
            thread::spawn(move || {
                let left = at.saturating_duration_since(Instant::now());
                if stopped.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    return false;
                }
                if let Some(pid) = i32::try_from(group).ok().and_then(Pid::from_raw) {
                    // ESRCH: it has just ended by itself.
                    let _ = kill_process_group(pid, Signal::KILL);
                }
                true
            })
        });
        Watch { stop, thread }
    }
}

pub struct Watch {
    stop: mpsc::Sender<()>,
    thread: Option<thread::JoinHandle<bool>>,
}

impl Watch {
    /// Ends the watch. Returns true if the deadline passed and the group was killed.
    pub fn finish(self) -> bool {
        drop(self.stop);
        self.thread.is_some_and(|thread| thread.join().unwrap_or(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_exists_when_asked_for_or_in_ci() {
        assert!(!Deadline::new(None, false).is_set());
        assert!(Deadline::new(None, true).is_set());
        assert!(Deadline::new(Some(1), false).is_set());
    }

    #[test]
    fn a_past_deadline_kills_the_group() {
        use std::os::unix::process::{CommandExt, ExitStatusExt};
        // The grandchild outlives its parent unless the whole group is killed.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 600 & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let watch = Deadline(Some(Instant::now())).watch(child.id());
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
        assert!(watch.finish());
    }

    #[test]
    fn a_watch_that_is_not_due_ends_at_once() {
        let watch = Deadline::new(Some(60), false).watch(0);
        assert!(!watch.finish());
    }
}
