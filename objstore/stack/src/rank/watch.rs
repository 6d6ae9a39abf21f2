//! A thread that looks after the devices of a plane.

use std::{
    convert::Infallible,
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

/// How often it looks. An unbind, or a kernel that rings doorbells of a drive that is not there any
/// more, waits that long.
const EVERY: Duration = Duration::from_millis(500);

/// The thread. Ended, and waited for, when this is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    stop: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `look` now and then, until it says that there is nothing more to look after.
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
