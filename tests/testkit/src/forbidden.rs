//! Programs for which `io_uring` is forbidden, as in most containers.
#![allow(unsafe_code, reason = "gives a child process a filter of system calls")]

use std::{io, os::unix::process::CommandExt as _, process::Command};

/// Set for such programs.
const FORBIDDEN: &str = "RIPIENO_TEST_WITHOUT_IO_URING";

/// Returns true in a program that [`without_io_uring`] started.
#[must_use]
pub fn is_without_io_uring() -> bool {
    std::env::var_os(FORBIDDEN).is_some()
}

/// Has the program, and all that it starts, get EPERM for the calls of `io_uring`.
pub fn without_io_uring(command: &mut Command) -> &mut Command {
    command.env(FORBIDDEN, "1");
    // SAFETY: two system calls, which may be made between fork and exec.
    unsafe { command.pre_exec(forbid) }
}

/// As the default profile of container runtimes does. See `seccomp(2)`.
fn forbid() -> io::Result<()> {
    let code = |code: u32| code as u16;
    let load = code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS);
    let at_least = code(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K);
    let more = code(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K);
    let end = code(libc::BPF_RET | libc::BPF_K);
    let step = |code, [jt, jf]: [u8; 2], k| libc::sock_filter { code, jt, jf, k };
    let mut steps = [
        // The number of the call is first in `seccomp_data`.
        step(load, [0, 0], 0),
        step(at_least, [0, 2], libc::SYS_io_uring_setup as u32),
        step(more, [1, 0], libc::SYS_io_uring_register as u32),
        step(end, [0, 0], libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(end, [0, 0], libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: numbers, and a program that lives for the call.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}
