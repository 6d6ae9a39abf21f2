//! Exceptions of `ripieno/errors.py`, with the messages of the crates below.

use std::path::Path;

use objstore::StoreError;
use pyo3::{PyErr, import_exception};
use ripieno_stack::{ErrorKind, StackError};

import_exception!(ripieno.errors, InvalidError);
import_exception!(ripieno.errors, NotFoundError);
import_exception!(ripieno.errors, OccupiedError);
import_exception!(ripieno.errors, LockedError);
import_exception!(ripieno.errors, NoSpaceError);
import_exception!(ripieno.errors, DamagedError);
import_exception!(ripieno.errors, DeviceError);
import_exception!(ripieno.errors, BusyError);
import_exception!(ripieno.errors, TransferError);
import_exception!(ripieno.errors, StaleError);
import_exception!(ripieno.errors, ReadOnlyError);
import_exception!(ripieno.errors, ClosedError);
import_exception!(ripieno.errors, LostError);

/// Converts an error of a store into its exception.
pub(crate) fn refused(error: impl Into<StackError>) -> PyErr {
    let error = error.into();
    let message = error.to_string();
    match error.kind() {
        ErrorKind::Invalid => InvalidError::new_err(message),
        ErrorKind::NotFound => NotFoundError::new_err(message),
        ErrorKind::Occupied => OccupiedError::new_err(message),
        ErrorKind::Locked => LockedError::new_err(message),
        ErrorKind::NoSpace => NoSpaceError::new_err(message),
        ErrorKind::Damaged => DamagedError::new_err(message),
        ErrorKind::System => DeviceError::new_err(message),
        ErrorKind::Busy => BusyError::new_err(message),
        ErrorKind::Io => TransferError::new_err(message),
        ErrorKind::Stale => StaleError::new_err(message),
        ErrorKind::ReadOnly => ReadOnlyError::new_err(message),
        ErrorKind::Failed => ClosedError::new_err(message),
        ErrorKind::Lost => LostError::new_err(message),
        ErrorKind::Unsupported => InvalidError::new_err(message),
    }
}

/// Same as [`refused`] for the store in `store_dir`; adds the command that examines a damaged
/// store.
pub(crate) fn refused_in(error: StackError, store_dir: &Path) -> PyErr {
    match error.kind() {
        ErrorKind::Damaged => DamagedError::new_err(format!(
            "{error}; `ripieno fsck --path {}` says what is damaged",
            store_dir.display()
        )),
        _ => refused(error),
    }
}

/// Converts an error of a catalog into its exception.
pub(crate) fn of_store(error: impl Into<StoreError>) -> PyErr {
    refused(error.into())
}

pub(crate) fn invalid(message: impl Into<String>) -> PyErr {
    InvalidError::new_err(message.into())
}

pub(crate) fn closed() -> PyErr {
    ClosedError::new_err("it was closed; open it again")
}
