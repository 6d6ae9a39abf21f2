//! Values of a process, which one that was forked from it must not use.

use crate::error::StackError;

/// The process in which a value was made. A fork of it has a copy of its memory, and none of its
/// threads: what waits for them there waits for ever, and locks that they held are never released.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process(u32);

impl Process {
    /// Returns this process.
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// Refuses calls in another process.
    pub(crate) fn check(self) -> Result<(), StackError> {
        match self.0 == std::process::id() {
            true => Ok(()),
            false => Err(StackError::Forked { process: self.0 }),
        }
    }
}

/// A value that only the process uses that made it. In a process that was forked from that one,
/// every access fails, and a drop does nothing: for the handles of interfaces in other languages.
#[derive(Debug)]
pub struct Own<T> {
    /// `None` only during drop.
    value: Option<T>,
    process: Process,
}

impl<T> Own<T> {
    /// Makes `value` one of this process.
    pub fn new(value: T) -> Self {
        Self { value: Some(value), process: Process::current() }
    }

    /// Returns the value.
    ///
    /// # Errors
    /// Returns [`StackError::Forked`] in another process.
    pub fn get(&self) -> Result<&T, StackError> {
        self.process.check()?;
        Ok(self.value.as_ref().expect("it is there until it is dropped"))
    }

    /// Takes the value.
    ///
    /// # Errors
    /// Same as [`Own::get`].
    pub fn into_inner(mut self) -> Result<T, StackError> {
        self.process.check()?;
        Ok(self.value.take().expect("it is there until it is dropped"))
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process.check().is_err() {
            std::mem::forget(self.value.take());
        }
    }
}
