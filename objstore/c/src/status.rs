//! Status codes and error messages.

#![allow(unsafe_code, reason = "the C interface: names without mangling")]

use std::{
    any::Any,
    cell::RefCell,
    ffi::{CStr, CString, c_char},
    panic::{AssertUnwindSafe, catch_unwind},
};

use ripieno_stack::{ErrorKind, StackError};

/// Version of the library that this header belongs to. A new major version may break compatibility;
/// a new minor one only adds (before 1.0, it may break compatibility); a new patch only fixes. The
/// shared library's soname is libripieno.so.MAJOR, before 1.0 libripieno.so.0.MINOR.
pub const VERSION_MAJOR: u32 = 0;
/// See RIPIENO_VERSION_MAJOR.
pub const VERSION_MINOR: u32 = 1;
/// See RIPIENO_VERSION_MAJOR.
pub const VERSION_PATCH: u32 = 0;

/// Result of a call. Later versions may add failures: treat an unknown number as a failure.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An argument is invalid: null, out of range, or a handle of another store.
    Invalid = 1,
    /// The directory has no store, or an incomplete one; or no server is there.
    NotFound = 2,
    /// The directory or a device holds other data, which would be lost.
    Occupied = 3,
    /// Another process uses the store.
    Locked = 4,
    /// The disk has too little space.
    NoSpace = 5,
    /// Home, devices or journal do not match the store: damaged, missing, swapped, of another store
    /// or for blocks of another shape.
    Damaged = 6,
    /// The operating system or a device refused a request.
    System = 7,
    /// The limit of operations in flight is reached: end one, then try again.
    Busy = 8,
    /// A transfer failed. When retrieving, the blocks count as not stored from now on. When
    /// storing, no block of the request is visible. With a server, also in place of
    /// RIPIENO_STATUS_STALE.
    Io = 9,
    /// A block was dropped after the lookup: look up again.
    Stale = 10,
    /// The store accepts no more writes; stored blocks can still be retrieved.
    ReadOnly = 11,
    /// The store has failed or was closed, or its server has ended: close it and open it again. Or
    /// this process was forked from the one that opened it.
    Failed = 12,
    /// A bug in the library.
    Panic = 13,
    /// The program was compiled for a newer library, and uses its additions.
    Version = 14,
    /// A server has the store, and does not do this for its clients.
    Unsupported = 15,
}

/// Status and message of a failed call.
#[derive(Debug)]
pub(crate) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Status::Invalid, message)
    }
}

impl<E: Into<StackError>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let status = match error.kind() {
            ErrorKind::Invalid => Status::Invalid,
            ErrorKind::NotFound => Status::NotFound,
            ErrorKind::Occupied => Status::Occupied,
            ErrorKind::Locked => Status::Locked,
            ErrorKind::NoSpace => Status::NoSpace,
            ErrorKind::Damaged => Status::Damaged,
            ErrorKind::System => Status::System,
            ErrorKind::Busy => Status::Busy,
            ErrorKind::Io => Status::Io,
            ErrorKind::Stale => Status::Stale,
            ErrorKind::ReadOnly => Status::ReadOnly,
            ErrorKind::Failed | ErrorKind::Lost => Status::Failed,
            ErrorKind::Unsupported => Status::Unsupported,
        };
        Self::new(status, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn remember(message: &str) {
    let text: Vec<u8> = message.bytes().filter(|byte| *byte != 0).collect();
    // No caller is left on a thread that is ending.
    let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
}

/// Runs an exported function: catches panics, and records the message of a failure.
pub(crate) fn guard(act: impl FnOnce() -> Result<(), Failure>) -> Status {
    // State that a panic leaves inconsistent is behind a poisoned lock, or a caller's handle.
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(())) => Status::Ok,
        Ok(Err(Failure { status, message })) => {
            remember(&message);
            status
        }
        Err(panic) => {
            remember(&format!("a defect of the library: {}", words(&*panic)));
            Status::Panic
        }
    }
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}

/// Returns the message of this thread's last failed call: what was asked, what was found, and what
/// to do; UTF-8. Empty if none failed. Valid until the thread's next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn ripieno_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the name of a status, such as "RIPIENO_STATUS_BUSY", or "unknown status". A static
/// string.
#[unsafe(no_mangle)]
pub extern "C" fn ripieno_status_name(status: i32) -> *const c_char {
    let name: &CStr = match status {
        0 => c"RIPIENO_STATUS_OK",
        1 => c"RIPIENO_STATUS_INVALID",
        2 => c"RIPIENO_STATUS_NOT_FOUND",
        3 => c"RIPIENO_STATUS_OCCUPIED",
        4 => c"RIPIENO_STATUS_LOCKED",
        5 => c"RIPIENO_STATUS_NO_SPACE",
        6 => c"RIPIENO_STATUS_DAMAGED",
        7 => c"RIPIENO_STATUS_SYSTEM",
        8 => c"RIPIENO_STATUS_BUSY",
        9 => c"RIPIENO_STATUS_IO",
        10 => c"RIPIENO_STATUS_STALE",
        11 => c"RIPIENO_STATUS_READ_ONLY",
        12 => c"RIPIENO_STATUS_FAILED",
        13 => c"RIPIENO_STATUS_PANIC",
        14 => c"RIPIENO_STATUS_VERSION",
        15 => c"RIPIENO_STATUS_UNSUPPORTED",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// Returns the version of the running library, in the form of RIPIENO_VERSION: MAJOR * 1000000 +
/// MINOR * 1000 + PATCH. A program linked with the shared library need not check it.
#[unsafe(no_mangle)]
pub extern "C" fn ripieno_version() -> u32 {
    VERSION_MAJOR * 1_000_000 + VERSION_MINOR * 1_000 + VERSION_PATCH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: valid until the next failure of this thread.
        unsafe { CStr::from_ptr(ripieno_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_is_a_status_and_each_thread_has_its_own_message() {
        assert_eq!(guard(|| panic!("number {}", 7)), Status::Panic);
        assert_eq!(last(), "a defect of the library: number 7");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(guard(|| Err(Failure::invalid("a\0b"))), Status::Invalid);
        assert_eq!(last(), "ab");
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!(last(), "ab", "a success changes nothing");
    }

    #[test]
    fn the_version_is_that_of_the_package() {
        let version = format!("{VERSION_MAJOR}.{VERSION_MINOR}.{VERSION_PATCH}");
        assert_eq!(version, env!("CARGO_PKG_VERSION"), "change the constants above, too");
        assert_eq!(ripieno_version(), 1_000);
    }

    #[test]
    fn every_status_has_a_name() {
        // SAFETY: a static string.
        let name = |status| unsafe { CStr::from_ptr(ripieno_status_name(status)) };
        assert_eq!(name(Status::Unsupported as i32), c"RIPIENO_STATUS_UNSUPPORTED");
        assert_eq!(name(Status::Unsupported as i32 + 1), c"unknown status");
    }
}
