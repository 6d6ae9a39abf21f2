//! A libcuda without a GPU: builds it, runs tests under it, and queries it.
//!
//! # Architecture
//! `libcuda.cpp` is the library, over memory of the process: streams are threads, and a launch runs
//! the host's build of the kernel with that name. `libgdrapi.cpp` maps memory of its GPU again,
//! like GDRCopy. Both are stricter than the real ones; their first comments list the differences.
//! [`isolated`] runs a test in a process of its own with them, because a process loads libcuda only
//! once; [`folder`] is the directory that other programs need in `LD_LIBRARY_PATH`.
//!
//! # Invariants
//! - Only tests depend on this crate.
//!
//! # Not implemented
//! - It does not model a GPU's speed, its memory model, or other behaviour of its driver.
#![allow(unsafe_code, reason = "calls the mock's own functions")]

use std::{
    ffi::{CString, c_char, c_int, c_long, c_uint, c_void},
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cudarc::driver::sys;

/// Set in a child process that runs one test.
const CHILD: &str = "GIO_CUDA_TEST";
/// The test case of the child process.
const CASE: &str = "GIO_CUDA_CASE";

/// Timeout of one case: only a hang takes as long, on any machine.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The libcuda that a test gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// No mock: none at all, unless the machine has one.
    Nothing,
    /// CUDA 11.4: functions are missing.
    Old,
    /// CUDA 12.0: no green contexts.
    Twelve,
    /// CUDA 12.9: the older interface for batched copies.
    TwelveNine,
    /// CUDA 13.0.
    Full,
}

impl Level {
    fn number(self) -> &'static str {
        match self {
            Self::Nothing => "0",
            Self::Old => "11",
            Self::Twelve => "12",
            Self::TwelveNine => "129",
            Self::Full => "13",
        }
    }
}

/// Environment variables.
pub type Variables<'a> = &'a [(&'a str, &'a str)];

/// Runs `body` in a child process with this libcuda and these variables. `test` is the name of the
/// calling test.
pub fn isolated(test: &str, level: Level, variables: Variables<'_>, body: impl FnOnce()) {
    each(test, level, &[variables], |_| body());
}

/// Same as [`isolated`], once for each case, whose number is passed to `body`.
pub fn each(test: &str, level: Level, cases: &[Variables<'_>], body: impl FnOnce(usize)) {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        std::thread::spawn(|| {
            std::thread::sleep(TIMEOUT);
            std::process::abort(); // it hangs; the parent reports which
        });
        let case = std::env::var(CASE).ok().and_then(|number| number.parse().ok());
        body(case.expect("the parent says which"));
        return;
    }
    let this = std::env::current_exe().expect("a program knows itself");
    for (case, variables) in cases.iter().enumerate() {
        let output = Command::new(&this)
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, test)
            .env(CASE, case.to_string())
            .env("LD_LIBRARY_PATH", folder(level))
            .envs(variables.iter().copied())
            .output()
            .expect("it starts again");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        let status = output.status;
        assert!(status.success(), "{level:?}, case {case} {variables:?}: {status}\n{out}{err}");
        assert!(out.contains("1 passed"), "{test} is not the test's name:\n{out}");
    }
}

/// Returns the directory with the mock of this level, built on first use: `libcuda.so`, and
/// GDRCopy's `libgdrapi.so.2`, which works unless `MOCK_GDR` is `off`; with `cached` its mappings
/// are cached memory.
pub fn folder(level: Level) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = place(&format!("cuda-mock-{}", level.number()));
    if level != Level::Nothing {
        build(level, "libcuda.cpp", &folder.join("libcuda.so"));
        build(level, "libgdrapi.cpp", &folder.join("libgdrapi.so.2"));
    }
    folder
}

/// Same as [`folder`], on a machine where GDRCopy was never installed.
pub fn folder_without_gdrcopy(level: Level) -> PathBuf {
    let bare = place(&format!("cuda-mock-{}-bare", level.number()));
    let library = folder(level).join("libcuda.so");
    let made = bare.join(format!("made-by-{}", std::process::id()));
    std::os::unix::fs::symlink(library, &made).expect("a link");
    std::fs::rename(made, bare.join("libcuda.so")).expect("the same folder");
    bare
}

/// Returns a directory beside the test's program, in the directory of its profile.
fn place(name: &str) -> PathBuf {
    let this = std::env::current_exe().expect("a program knows itself");
    let folder = this.ancestors().nth(2).expect("target/profile/deps/test").join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Compiles one of the libraries, unless it is newer than its sources.
fn build(level: Level, source: &str, library: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let include = here.join("../include");
    let twins = here.join("../../bench/ptx");
    let sources = [here.to_owned(), include.join("gio"), include.join("pool"), twins];
    if !is_older(library, &sources) {
        return;
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let made = library.with_extension(format!("made-by-{}", std::process::id()));
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-fno-strict-aliasing"])
        .arg(format!("-DMOCK_LEVEL={}", level.number()))
        .arg("-I")
        .arg(&include)
        .arg(here.join(source))
        .arg("-o")
        .arg(&made)
        .arg("-ldl")
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}; install a C++ compiler"));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    std::fs::rename(made, library).expect("the same folder");
}

/// Returns true if one of the files in `sources` is newer than `library`.
fn is_older(library: &Path, sources: &[PathBuf]) -> bool {
    let when = |path: &Path| std::fs::metadata(path).and_then(|data| data.modified());
    let Ok(built) = when(library) else { return true };
    // A missing directory has no newer files.
    let files = sources.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    files
        .map(|entry| entry.expect("a file").path())
        .any(|path| when(&path).expect("a file") > built)
}

fn function<T: Copy>(name: &str) -> T {
    let name = CString::new(name).expect("a name");
    // SAFETY: the mock is loaded; each caller below names a function and its type in libcuda.cpp.
    unsafe { *sys::culib().get::<T>(name.as_bytes_with_nul()).expect("a function of the mock") }
}

fn text(name: &str) -> CString {
    CString::new(name).expect("a name")
}

/// Makes the call `name` fail with `code` after `skip` more successes.
pub fn inject(name: &str, skip: c_long, code: c_int) {
    let set: unsafe extern "C" fn(*const c_char, c_long, c_int) = function("mock_inject");
    // SAFETY: see `function`.
    unsafe { set(text(name).as_ptr(), skip, code) }
}

/// Returns the number of calls of `name`.
pub fn count(name: &str) -> c_long {
    let get: unsafe extern "C" fn(*const c_char) -> c_long = function("mock_count");
    // SAFETY: see `function`.
    unsafe { get(text(name).as_ptr()) }
}

/// Returns the number of objects created and not freed.
pub fn live() -> c_long {
    let get: unsafe extern "C" fn() -> c_long = function("mock_live");
    // SAFETY: see `function`.
    unsafe { get() }
}

/// Suspends or resumes kernels.
pub fn hang(hang: bool) {
    let set: unsafe extern "C" fn(c_int) = function("mock_hang");
    // SAFETY: see `function`.
    unsafe { set(c_int::from(hang)) }
}

/// Suspends or resumes copies.
pub fn hold_copies(hold: bool) {
    let set: unsafe extern "C" fn(c_int) = function("mock_hold_copies");
    // SAFETY: see `function`.
    unsafe { set(c_int::from(hold)) }
}

/// Loses the GPU with this error: its work ends, and every call returns the error.
pub fn lose(code: c_int) {
    let set: unsafe extern "C" fn(c_int) = function("mock_lose");
    // SAFETY: see `function`.
    unsafe { set(code) }
}

/// Returns true if this process may read the byte at `address`.
pub fn is_reachable(address: usize) -> bool {
    let ask: unsafe extern "C" fn(*const c_void) -> c_int = function("mock_reachable");
    // SAFETY: see `function`; Linux reads the byte, if it can.
    unsafe { ask(std::ptr::with_exposed_provenance(address)) == 1 }
}

/// Returns the flags that the page at `host` is registered with, 0 if it is not.
pub fn registered(host: usize) -> c_uint {
    let get: unsafe extern "C" fn(*mut c_void) -> c_uint = function("mock_registered");
    // SAFETY: see `function`; the address is only compared.
    unsafe { get(std::ptr::without_provenance_mut(host)) }
}

/// Asserts that every object was freed, none under a running kernel, and that this thread is
/// unchanged: no context, and its original capture mode.
pub fn assert_clean() {
    assert_eq!(live(), 0, "not freed");
    assert_eq!(count("freed while a kernel ran"), 0);
    assert_eq!(count("freed while pinned"), 0);
    assert_eq!(count("made beside the I/O kernel"), 0);
    assert_thread_clean();
}

/// Checks the thread's state for [`assert_clean`].
pub fn assert_thread_clean() {
    let get: unsafe extern "C" fn() -> c_uint = function("mock_thread");
    // SAFETY: see `function`.
    assert_eq!(unsafe { get() }, 0, "contexts, or the capture mode, of this thread");
}
