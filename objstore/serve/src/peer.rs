//! The user and process at the other end of a socket.

#![allow(
    unsafe_code,
    reason = "rustix has no value for a process of another PID namespace, whose number is 0"
)]

use std::{
    io,
    os::{fd::AsRawFd as _, unix::net::UnixStream},
};

use rustix::event::{PollFd, PollFlags, Timespec};

/// User and process of a client, when it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) uid: u32,
    /// 0 if this process cannot see it.
    pub(crate) pid: i32,
}

impl Peer {
    /// Returns the credentials that the kernel has for a socket (`SO_PEERCRED`).
    pub(crate) fn of(stream: &UnixStream) -> io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the option is a `ucred`, of which `len` has the size; both live here.
        let failed = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        match failed {
            0 => Ok(Self { uid: found.uid, pid: found.pid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Returns true if the other end sends nothing more.
pub(crate) fn is_cut(stream: &UnixStream) -> bool {
    let mut ready = [PollFd::new(stream, PollFlags::RDHUP)];
    rustix::event::poll(&mut ready, Some(&Timespec::default())).is_ok_and(|cut| cut > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_names_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let uid = rustix::process::getuid().as_raw();
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Peer::of(&one).unwrap(), Peer { uid, pid });
    }
}
