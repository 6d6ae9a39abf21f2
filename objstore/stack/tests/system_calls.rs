//! The system calls that make a store's directories: a file is renamed to its final name only when
//! its contents are durable, and the name is durable before anything relies on it.
//!
//! The test runs itself as a child and traces all of its threads with ptrace. I/O through io_uring
//! is not visible as system calls: see `driver/emu/tests/file_media.rs`.
#![allow(unsafe_code, reason = "traces a child process with ptrace")]
#![cfg(target_arch = "x86_64")]

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write as _},
    os::unix::{fs::FileExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use libc::{c_int, c_long, pid_t};
use nvme_driver::{Clock, MonotonicClock};
use objstore::{Codec, KvShape, StoreId};
use ripieno_stack::{RankMedia, Ranks, RanksOptions};

const TRACED: &str = "RIPIENO_TEST_TRACED";

/// The relevant calls, with their paths.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Open(PathBuf),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
}

/// The traced process: makes a store for two ranks.
#[test]
fn traced() {
    let Ok(dir) = std::env::var(TRACED) else { return };
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let shape = KvShape { layers: 1, segments: 1, object_bytes: 4096, block_tokens: 16 };
    let media = RankMedia::Files { bytes: 16 << 20, count: 1, lba_bytes: 4096 };
    let options = RanksOptions { id: StoreId([7; 16]), ranks: 2, shape, codec: Codec::None, media };
    Ranks::prepare(dir.as_ref(), &options, &clock).unwrap();
}

#[test]
fn a_name_is_given_to_what_is_on_the_disk_and_is_there_itself_afterwards() {
    // Not the temporary directory: that may be a tmpfs without direct I/O.
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let calls = match trace(place.path()) {
        Ok(calls) => calls,
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            let test = "a_name_is_given_to_what_is_on_the_disk_and_is_there_itself_afterwards";
            writeln!(io::stdout(), "SKIPPED {test}: ptrace is not allowed: {error}").unwrap();
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let is_rename = |call: &Call| matches!(call, Call::Rename(..));
    let mut renamed = Vec::new();
    for (at, call) in calls.iter().enumerate() {
        let Call::Rename(from, to) = call else { continue };
        let (before, after) = (&calls[..at], &calls[at + 1..]);
        let opened = before.iter().rposition(|call| *call == Call::Open(from.clone()));
        let written =
            opened.is_some_and(|opened| before[opened..].contains(&Call::Sync(from.clone())));
        assert!(written, "{to:?} was not on the disk: {before:?}");
        let dir = to.parent().unwrap().to_owned();
        let next = after.iter().position(is_rename).unwrap_or(after.len());
        assert!(after[..next].contains(&Call::Sync(dir)), "the name of {to:?} may go: {after:?}");
        renamed.push(to.strip_prefix(place.path()).unwrap().display().to_string());
    }
    // Each is written twice: `making`, then `ready`.
    renamed.sort();
    renamed.dedup();
    let dirs = ["catalog", "rank-0", "rank-1"].map(|store_dir| format!("{store_dir}/home.json"));
    let all: Vec<String> = dirs.into_iter().chain(["store.json".to_owned()]).collect();
    assert_eq!(renamed, all);
    assert_eq!(calls.iter().filter(|call| is_rename(call)).count(), 2 * all.len());
}

/// A call that a thread has entered.
struct Entered {
    number: c_long,
    args: [u64; 6],
}

#[derive(Default)]
struct Trace {
    calls: Vec<Call>,
    entered: HashMap<pid_t, Entered>,
    /// By descriptor.
    paths: HashMap<u64, PathBuf>,
}

/// Traces this program while it makes a store in `dir`.
fn trace(dir: &Path) -> io::Result<Vec<Call>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", "traced"]).env(TRACED, dir).stdout(Stdio::null());
    // SAFETY: one system call, which may be made between fork and exec.
    let command = unsafe { command.pre_exec(|| ptrace(libc::PTRACE_TRACEME, 0, 0, 0)) };
    let child = command.spawn()?;
    let main = child.id() as pid_t;
    let status = wait(main)?.1;
    assert!(libc::WIFSTOPPED(status), "not stopped at its first instruction: {status:#x}");
    let follow = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
    ptrace(libc::PTRACE_SETOPTIONS, main, 0, follow as usize)?;
    ptrace(libc::PTRACE_SYSCALL, main, 0, 0)?;
    let mut trace = Trace::default();
    loop {
        let (thread, status) = wait(-1)?;
        if thread == main && !libc::WIFSTOPPED(status) {
            assert_eq!(status, 0, "the process that was traced failed");
            return Ok(trace.calls);
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let signal = match libc::WSTOPSIG(status) {
            stop if stop == libc::SIGTRAP | 0x80 => {
                trace.stopped(thread)?;
                0
            }
            // A new thread, or one that started another.
            libc::SIGSTOP | libc::SIGTRAP => 0,
            signal => signal,
        };
        match ptrace(libc::PTRACE_SYSCALL, thread, 0, signal as usize) {
            // It ended meanwhile, with its process.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            resumed => resumed?,
        }
    }
}

impl Trace {
    /// Handles a thread at the beginning or the end of a call.
    fn stopped(&mut self, thread: pid_t) -> io::Result<()> {
        // SAFETY: all zeroes are registers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        ptrace(libc::PTRACE_GETREGS, thread, 0, &raw mut registers as usize)?;
        let Some(Entered { number, args }) = self.entered.remove(&thread) else {
            let libc::user_regs_struct { orig_rax, rdi, rsi, rdx, r10, r8, r9, .. } = registers;
            let args = [rdi, rsi, rdx, r10, r8, r9];
            self.entered.insert(thread, Entered { number: orig_rax as c_long, args });
            return Ok(());
        };
        if (registers.rax as i64) < 0 {
            return Ok(());
        }
        let path = |at: usize| text(thread, args[at]);
        match number {
            libc::SYS_openat => {
                let path = path(1)?;
                self.paths.insert(registers.rax, path.clone());
                self.calls.push(Call::Open(path));
            }
            libc::SYS_fsync | libc::SYS_fdatasync => {
                let path = self.paths.get(&args[0]).cloned().unwrap_or_default();
                self.calls.push(Call::Sync(path));
            }
            libc::SYS_rename => self.calls.push(Call::Rename(path(0)?, path(1)?)),
            libc::SYS_renameat | libc::SYS_renameat2 => {
                self.calls.push(Call::Rename(path(1)?, path(3)?));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Reads the path at this address of a thread.
fn text(thread: pid_t, address: u64) -> io::Result<PathBuf> {
    let memory = File::open(format!("/proc/{thread}/mem"))?;
    let mut bytes = Vec::new();
    for at in address.. {
        let mut byte = [0];
        memory.read_exact_at(&mut byte, at)?;
        if byte == [0] {
            break;
        }
        bytes.extend(byte);
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned().into())
}

fn ptrace(request: u32, thread: pid_t, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: a request that writes gets the address of what it writes, from `stopped`.
    let result = unsafe { libc::ptrace(request, thread, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn wait(thread: pid_t) -> io::Result<(pid_t, c_int)> {
    let mut status = 0;
    // SAFETY: writes the status.
    let thread = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    if thread < 0 { Err(io::Error::last_os_error()) } else { Ok((thread, status)) }
}
