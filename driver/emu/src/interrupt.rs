//! Interrupt vectors as eventfds.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, OnceLock},
};

use nvme_driver::{Interrupt, InterruptError};
use rustix::event::EventfdFlags;

/// The vectors of one controller. Clones are handles to the same vectors.
#[derive(Debug, Clone)]
pub struct Interrupts {
    vectors: Arc<[OnceLock<Arc<OwnedFd>>]>,
}

impl Interrupts {
    /// Creates `count` vectors without listeners.
    #[must_use]
    pub fn new(count: u16) -> Self {
        Self { vectors: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// Returns the number of vectors.
    #[must_use]
    pub fn count(&self) -> u16 {
        u16::try_from(self.vectors.len()).unwrap_or(u16::MAX)
    }

    /// Signals `vector`. Returns whether it has a listener. A vector without one costs one load.
    pub fn raise(&self, vector: u16) -> bool {
        let Some(fd) = self.vectors.get(usize::from(vector)).and_then(OnceLock::get) else {
            return false;
        };
        // The only failure is a counter near its limit: the vector is then already signalled.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        true
    }

    /// Returns the eventfd of `vector`, created on the first call.
    pub(crate) fn listen(&self, bus: &str, vector: u16) -> Result<Interrupt, InterruptError> {
        let cell = self.vectors.get(usize::from(vector)).ok_or_else(|| {
            InterruptError::NoSuchVector { bus: bus.into(), vector, available: self.count() }
        })?;
        if cell.get().is_none() {
            let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|error| InterruptError::Os {
                    bus: bus.into(),
                    vector,
                    source: io::Error::from(error),
                })?;
            // If another thread was faster, its eventfd stays.
            let _ = cell.set(Arc::new(fd));
        }
        let eventfd = cell.get().expect("set above").clone();
        Ok(Interrupt { eventfd, vector })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raised_vectors_are_readable() {
        let vectors = Interrupts::new(2);
        assert!(!vectors.raise(1), "no listener yet");
        let heard = vectors.listen("emu0", 1).unwrap();
        assert!(vectors.raise(1));
        assert!(vectors.raise(1));
        let mut count = [0u8; 8];
        rustix::io::read(&heard.eventfd, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);
        assert!(rustix::io::read(&heard.eventfd, &mut count).is_err(), "acknowledged");
        assert!(!vectors.raise(7));
        let error = vectors.listen("emu0", 2).unwrap_err().to_string();
        assert!(error.contains("vector 2"), "{error}");
    }
}
