//! Threads that watch something, or pace it.

use std::{
    convert::Infallible,
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

/// A thread, which is stopped and joined ([`nvme_driver::join`]) on drop.
#[derive(Debug)]
pub struct Watch {
    stop: Option<Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `look` until it returns `None`, and waits after each call for as long as it returns.
    ///
    /// # Errors
    /// Returns an error if the system has no thread.
    pub fn spawn(
        name: &str,
        mut look: impl FnMut() -> Option<Duration> + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<Infallible>();
        let run = move || {
            while let Some(time) = look() {
                if stopped.recv_timeout(time) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().map(nvme_driver::join);
    }
}
