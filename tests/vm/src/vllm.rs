//! vLLM's engines, which share drive B through a server: python/tests/with_vllm/test_served.py, run
//! from drive C, which is never written to.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::hardware::DRIVE_B;
use crate::kmsg::Kmsg;
use crate::program;
use crate::runner::{Suite, tests};

pub const SUITE: Suite =
    Suite { name: "vllm", seconds_max: 3600, tests: tests![engines_and_ranks_share_a_drive] };

/// Label and paths on the file system that xtask/src/vm/files.sh makes.
const LABEL: &str = "ripieno-vllm";
const PYTHON: &str = "python";
const TESTS: &str = "tests";
/// vLLM's record of its models, if it has run on the host, and the record's place in the guest.
const MODELS: &str = "models";
const CACHE: &str = "/tmp/.cache/vllm/modelinfos";
/// Two engines, of two ranks each and of one. Other tests compute for hours on this machine.
const TEST: &str = "test_engines_share_what_a_server_keeps";
/// Timeout of an engine in seconds.
const SECONDS: u32 = 1800;

const ROOT: &str = "/mnt";
/// The server's program, in that root.
const PROGRAM: &str = "/tmp/ripieno";

/// Runs the tests in the other root. No device accesses memory that it may not.
fn engines_and_ranks_share_a_drive() -> Result<()> {
    prepare()?;
    let mut log = Kmsg::from_now()?;
    let (python, tests) = (read(PYTHON)?, read(TESTS)?);
    let wanted = format!("{tests}/with_vllm/test_served.py::{TEST}");
    let variables = [
        format!("RIPIENO_PROGRAM={PROGRAM}"),
        format!("RIPIENO_DRIVES={DRIVE_B}"),
        format!("RIPIENO_SECONDS={SECONDS}"),
        format!("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS={SECONDS}"),
        // Ranks of an engine find each other there.
        "GLOO_SOCKET_IFNAME=lo".to_owned(),
        "VLLM_HOST_IP=127.0.0.1".to_owned(),
        "PATH=/usr/bin:/bin".to_owned(),
        "HOME=/tmp".to_owned(),
        "USER=root".to_owned(),
    ];
    let mut words: Vec<&str> = variables.iter().map(String::as_str).collect();
    words.extend([
        "chroot",
        ROOT,
        &python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-v",
        "-x",
        &wanted,
    ]);
    let status = program::start_talking("env", &words)?.wait()?;
    ensure!(status.success(), "pytest ended with {status}; its output is above");
    let stray = log.lines().into_iter().find(|line| line.contains("DMAR: [DMA"));
    ensure!(stray.is_none(), "{stray:?}");
    Ok(())
}

fn read(name: &str) -> Result<String> {
    let path = format!("{ROOT}/{name}");
    fs::read_to_string(&path).with_context(|| format!("no {path}"))
}

/// Mounts the other root, and hands drive B to VFIO.
fn prepare() -> Result<()> {
    let found = program::run("findfs", &[&format!("LABEL={LABEL}")])?.success()?;
    program::run("mount", &["-t", "ext4", "-o", "ro", found.out.trim(), ROOT])?.success()?;
    fs::create_dir_all("/dev/shm")?;
    for (kind, folder) in [
        ("devtmpfs", "dev"),
        ("proc", "proc"),
        ("sysfs", "sys"),
        ("tmpfs", "tmp"),
        ("tmpfs", "dev/shm"),
    ] {
        program::run("mount", &["-t", kind, kind, &format!("{ROOT}/{folder}")])?.success()?;
    }
    program::run("ip", &["link", "set", "lo", "up"])?.success()?;
    fs::copy("/bin/ripieno", format!("{ROOT}{PROGRAM}"))?;
    let cache = format!("{ROOT}{CACHE}");
    fs::create_dir_all(&cache)?;
    for entry in fs::read_dir(format!("{ROOT}{}", read(MODELS)?)).into_iter().flatten().flatten() {
        fs::copy(entry.path(), Path::new(&cache).join(entry.file_name()))?;
    }
    program::run("nvme-bind", &["bind", DRIVE_B])?.success()?;
    Ok(())
}
