//! This process, as the owner of devices that other processes may reach.

use std::time::{SystemTime, UNIX_EPOCH};

use objstore::Owner;

use crate::error::StackError;

/// Returns this process with a new random id, for [`objstore::StoreOptions::owner`], which
/// [`crate::Builder`] fills in.
///
/// # Errors
/// Returns [`StackError::Failed`] if the system has no random bytes.
pub fn this_process() -> Result<Owner, StackError> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    // A clock before 1970 only makes a message say less.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    Ok(Owner { id: random()?, host, pid: std::process::id(), since })
}

/// Returns random bytes from the operating system, for identities.
pub(crate) fn random() -> Result<[u8; 16], StackError> {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        other => {
            let why = format!("the system gave no random bytes ({other:?})");
            Err(StackError::failed("drawing the identity of a new store", why))
        }
    }
}
