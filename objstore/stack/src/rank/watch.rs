//! A thread that watches the devices of a plane.

use std::{
    convert::Infallible,
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

/// Interval between checks. An unbind, or a kernel that rings doorbells of a removed drive, waits
/// that long.
const EVERY: Duration = Duration::from_millis(500);

/// The thread, which is stopped and joined on drop.
#[derive(Debug)]
pub(super) struct Watch {
    stop: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `look` periodically until it returns false.
    pub(super) fn spawn(look: impl Fn() -> bool + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<Infallible>();
        let run = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(EVERY) {
                if !look() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("ripieno watch".to_owned()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A panic was reported when it happened.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
