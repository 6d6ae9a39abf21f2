//! One boot: a machine, its console, and a watchdog.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::needs;
use crate::tally::Tally;
use crate::vm::Prepared;
use crate::vm::console::{Console, Heard};
use crate::vm::host;
use crate::vm::machine::{self, Machine};
use crate::vm::qmp::Qmp;
use crate::{child, vm};

/// Guest tests that share one boot.
#[derive(Debug)]
pub struct Suite {
    pub name: &'static str,
    pub about: &'static str,
    /// True if the kernel's own driver binds the drives at boot, as on any computer.
    nvme: bool,
    files: Files,
    /// True for drives S and Z.
    is_odd: bool,
    /// Time without a line from the guest after which it hangs, in seconds: longer than that of
    /// each of its tests, so that the guest can say which one hung.
    silence_max: u64,
}

/// The file system that a suite needs on a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Files {
    None,
    /// Python and the package, on drive B.
    Python,
    /// vLLM, on drive C of a large machine.
    Vllm,
}

/// Returns a suite of the driver: the kernel's own one does not bind the drives.
const fn suite(name: &'static str, about: &'static str) -> Suite {
    Suite { name, about, nvme: false, files: Files::None, is_odd: false, silence_max: 900 }
}

/// All suites, in starting order.
pub const SUITES: &[Suite] = &[
    suite("smoke", "the machine itself: devices, IOMMU groups, the line to the host"),
    Suite {
        nvme: true,
        ..suite(
            "bind",
            "nvme-bind: list, bind, refuse what is in use, restore, crashes, two at once",
        )
    },
    suite("vfio", "the driver through VFIO: PRP, SGL, splits, LBA sizes, namespaces, interrupts"),
    suite("peer", "queues, descriptors and data in the memory of another device"),
    suite(
        "faults",
        "stray DMA, lost queues, media errors, commands that never end, hot unplug, crashes",
    ),
    suite("replay", "`ripieno replay` on both drives, with every byte checked"),
    Suite {
        is_odd: true,
        ..suite("odd", "one namespace behind two controllers, a zoned namespace: who gets which")
    },
    Suite {
        nvme: true,
        is_odd: true,
        ..suite("ng", "namespaces that the kernel's driver keeps, by passthrough: who gets which")
    },
    Suite {
        nvme: true,
        files: Files::Python,
        ..suite("python", "a store of the Python package, in files on a drive")
    },
    Suite {
        nvme: true,
        files: Files::Vllm,
        silence_max: 4000,
        ..suite(
            "vllm",
            "vLLM's engines and ranks share a drive through `ripieno serve`; only by its name",
        )
    },
];

/// Options of a run, besides the suite.
#[derive(Clone, Copy, Debug)]
pub struct Wishes<'a> {
    /// Show all output of the guest.
    pub verbose: bool,
    /// Keep drives and memory in `target/vm/run`.
    pub keep: bool,
    /// Run only tests whose name contains this.
    pub filter: Option<&'a str>,
}

/// Result of a suite.
#[derive(Debug)]
pub struct Ended {
    pub tally: Tally,
    /// Error besides the failed tests.
    pub wrong: Option<String>,
    /// True if QEMU crashed, which no guest should be able to cause.
    pub crashed: bool,
    pub took: Duration,
}

impl Suite {
    /// Returns the reason why it cannot run.
    pub fn lacks(&self) -> Result<Option<String>> {
        if self.files == Files::None {
            return Ok(None);
        }
        let why = child::text(vm::files("lacks").arg(self.name))?;
        Ok(Some(why.trim().to_owned()).filter(|why| !why.is_empty()))
    }

    /// Returns true if it runs without being named: a large machine takes too much memory.
    pub fn is_default(&self) -> bool {
        self.files != Files::Vllm
    }

    /// Boots, and reads the console until the machine ends or hangs.
    pub fn run(&self, prepared: &Prepared, wishes: Wishes<'_>) -> Result<Ended> {
        let (start, place) = (Instant::now(), Place::new(prepared, self.name, wishes.keep)?);
        let drive = |file| place.folder.join(file);
        match self.files {
            Files::None => {}
            Files::Python => child::run(vm::files("python").arg(drive(machine::DRIVE_B1.0)))?,
            Files::Vllm => child::run(vm::files("vllm").arg(drive(machine::DRIVE_C)))?,
        }
        let mut arguments = self.kernel_arguments();
        if let Some(filter) = wishes.filter {
            arguments.push_str(&format!(" ripieno.test={filter}"));
        }
        let mut boot = Boot::start(prepared, &place, self, arguments, false)?;
        let (answers, qmp) = boot.serve(&place).with_context(|| place.complaints())?;
        let log = prepared.log(self.name);
        let limit = Duration::from_secs(self.silence_max);
        let (console, in_time) = boot.read(&log, limit, wishes.verbose, &qmp)?;
        let status = boot.end()?;
        if answers.join().is_err() {
            bail!("the thread that answers the guest panicked");
        }
        let (mut tally, wrong) = console.finish();
        let ended = match status.signal() {
            _ if !in_time => Some(format!(
                "it said nothing for {} s; {} shows what each task waited for",
                self.silence_max,
                log.display()
            )),
            Some(signal) => Some(format!("QEMU was ended by signal {signal}")),
            None if wrong.is_none() && (guest_code(status) == Some(0)) != (tally.failed == 0) => {
                Some(format!("its exit code does not go with its tests ({status})"))
            }
            None => None,
        };
        let wrong: Vec<String> = [wrong, ended].into_iter().flatten().collect();
        let wrong = (!wrong.is_empty()).then(|| wrong.join("; "));
        if wrong.is_some() && tally.failed == 0 {
            tally.failed = 1;
        }
        let crashed = in_time && status.signal().is_some();
        Ok(Ended { tally, wrong, crashed, took: start.elapsed() })
    }

    fn kernel_arguments(&self) -> String {
        // The driver is built into the kernel and would bind the drives.
        let nvme = if self.nvme { "" } else { " initcall_blacklist=nvme_init" };
        format!("ripieno.suite={}{nvme}", self.name)
    }
}

/// Boots into a shell on this terminal.
pub fn shell(prepared: &Prepared, with_nvme: bool) -> Result<()> {
    let place = Place::new(prepared, "shell", false)?;
    let suite = Suite { nvme: with_nvme, ..suite("shell", "") };
    let arguments = suite.kernel_arguments();
    let mut boot = Boot::start(prepared, &place, &suite, arguments, true)?;
    let (answers, _) = boot.serve(&place)?;
    boot.child.wait()?;
    let _ = answers.join();
    Ok(())
}

/// Decodes the guest's exit code from isa-debug-exit; `None` if the guest did not get there.
fn guest_code(status: ExitStatus) -> Option<i32> {
    status.code().filter(|code| code & 1 == 1).map(|code| code >> 1)
}

/// Folders of one boot.
struct Place {
    /// Drives and memory.
    folder: PathBuf,
    /// Sockets, whose paths are limited to 107 bytes.
    sockets: PathBuf,
    /// QEMU's stderr.
    complaints: PathBuf,
    keep: bool,
}

impl Place {
    fn new(prepared: &Prepared, name: &str, keep: bool) -> Result<Self> {
        let folder = prepared.folder.join("run").join(name);
        let sockets = format!("xtask-vm-{}-{name}", std::process::id());
        let sockets = std::env::temp_dir().join(sockets);
        for folder in [&folder, &sockets, &prepared.folder.join("logs")] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        machine::make_files(&folder)?;
        let complaints = prepared.folder.join("logs").join(format!("{name}.qemu.log"));
        Ok(Self { folder, sockets, complaints, keep })
    }

    /// Returns QEMU's error messages.
    fn complaints(&self) -> String {
        let text = fs::read_to_string(&self.complaints).unwrap_or_default();
        format!("QEMU says: {}", text.trim())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The next boot overwrites leftovers.
        let _ = fs::remove_dir_all(&self.sockets);
        if !self.keep {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Time for a machine that hangs to say what it was doing: some 2,000 lines.
const LAST_WORDS_MAX: Duration = Duration::from_secs(60);

/// A running machine.
struct Boot {
    child: Child,
    /// `None` if it is on the terminal.
    console: Option<UnixListener>,
    control: UnixListener,
    qmp: UnixListener,
}

impl Boot {
    fn start(
        prepared: &Prepared,
        place: &Place,
        suite: &Suite,
        arguments: String,
        interactive: bool,
    ) -> Result<Self> {
        let path = place.sockets.join("console");
        let machine = Machine {
            kernel: &fs::canonicalize(&prepared.kernel)?,
            initrd: &fs::canonicalize(&prepared.initrd)?,
            arguments,
            console: match interactive {
                true => machine::Console::Terminal,
                false => machine::Console::Socket(path.clone()),
            },
            control: place.sockets.join("control"),
            qmp: place.sockets.join("qmp"),
            is_large: suite.files == Files::Vllm,
            is_odd: suite.is_odd,
        };
        let console = if interactive { None } else { Some(listen(&path)?) };
        let (control, qmp) = (listen(&machine.control)?, listen(&machine.qmp)?);
        let mut command = Command::new(needs::program("qemu-system-x86_64")?);
        command.args(machine.arguments()).current_dir(&place.folder);
        if !interactive {
            // QEMU also reports injected errors.
            let complaints = File::create(&place.complaints)?;
            command.stdin(Stdio::null()).stdout(complaints.try_clone()?).stderr(complaints);
        }
        let child = command.spawn().context("cannot start QEMU")?;
        Ok(Self { child, console, control, qmp })
    }

    /// Starts to answer the guest's requests.
    fn serve(&mut self, place: &Place) -> Result<(thread::JoinHandle<()>, Arc<Mutex<Qmp>>)> {
        let control = accept(&self.control, &mut self.child)?;
        let qmp = Arc::new(Mutex::new(Qmp::new(accept(&self.qmp, &mut self.child)?)?));
        let (folder, monitor) = (place.folder.clone(), qmp.clone());
        let answers = thread::spawn(move || {
            if let Err(error) = host::serve(control, &monitor, &folder) {
                eprintln!("{error:#}");
            }
        });
        Ok((answers, qmp))
    }

    /// Reads the console to its end. A machine that says nothing for `limit` is ended: its kernel
    /// is made to panic, and then says what it was doing, if it still can.
    fn read(
        &mut self,
        log: &Path,
        mut limit: Duration,
        verbose: bool,
        qmp: &Mutex<Qmp>,
    ) -> Result<(Console, bool)> {
        let socket = self.console.as_ref().context("the console is on the terminal")?;
        let lines = lines_of(accept(socket, &mut self.child)?);
        let mut log =
            File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let (mut console, mut in_time) = (Console::default(), true);
        let mut since = Instant::now();
        loop {
            match lines.recv_timeout(limit) {
                Ok(line) => {
                    log.write_all(&line)?;
                    if !in_time {
                        continue;
                    }
                    let line = String::from_utf8_lossy(&line);
                    match console.line(&line) {
                        Some((test, heard)) => {
                            show(&test, heard, since.elapsed());
                            since = Instant::now();
                        }
                        None if verbose => eprintln!("  | {}", line.trim_end()),
                        None => {}
                    }
                }
                Err(RecvTimeoutError::Timeout) if in_time => {
                    (in_time, limit) = (false, LAST_WORDS_MAX);
                    if let Err(error) = interrupt(qmp) {
                        writeln!(log, "host: QEMU itself does not answer: {error:#}")?;
                        self.child.kill()?;
                    }
                }
                // Output from before the kill is still read.
                Err(RecvTimeoutError::Timeout) => {
                    self.child.kill()?;
                    thread::yield_now();
                }
                Err(RecvTimeoutError::Disconnected) => return Ok((console, in_time)),
            }
        }
    }

    fn end(mut self) -> Result<ExitStatus> {
        self.child.wait().context("waiting for QEMU")
    }
}

impl Drop for Boot {
    fn drop(&mut self) {
        // No effect on a child that has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends the machine an NMI, at which its kernel panics.
fn interrupt(qmp: &Mutex<Qmp>) -> Result<()> {
    let Ok(mut qmp) = qmp.try_lock() else { bail!("a request of the guest has the monitor") };
    qmp.execute(&json!({ "execute": "inject-nmi" })).map(drop)
}

fn listen(path: &Path) -> Result<UnixListener> {
    let socket = UnixListener::bind(path).and_then(|socket| {
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    socket.with_context(|| format!("cannot listen on {}", path.display()))
}

/// Accepts QEMU's connection, unless QEMU ends first.
fn accept(socket: &UnixListener, child: &mut Child) -> Result<UnixStream> {
    let until = Instant::now() + Duration::from_secs(600);
    loop {
        match socket.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("waiting for QEMU to connect"),
        }
        if let Some(status) = child.try_wait()? {
            bail!("QEMU ended at once ({status})");
        }
        if Instant::now() > until {
            bail!("QEMU did not connect");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the lines from a socket, until it is closed.
fn lines_of(stream: UnixStream) -> mpsc::Receiver<Vec<u8>> {
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
            if send.send(std::mem::take(&mut line)).is_err() {
                break;
            }
        }
    });
    lines
}

fn show(test: &str, heard: Heard, took: Duration) {
    let seconds = took.as_secs_f64();
    match heard {
        Heard::Ok => println!("test {test} ... ok <{seconds:.1}s>"),
        Heard::Failed(why) => println!("test {test} ... FAILED <{seconds:.1}s>\n    {why}"),
        Heard::Skipped(why) => println!("test {test} ... ignored, {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_kernel_lets_go_of_the_drives() {
        for (index, suite) in SUITES.iter().enumerate() {
            assert!(SUITES[..index].iter().all(|other| other.name != suite.name));
            let blacklisted = suite.kernel_arguments().contains("initcall_blacklist=nvme_init");
            assert_eq!(blacklisted, !["bind", "ng", "python", "vllm"].contains(&suite.name));
        }
    }

    #[test]
    fn the_exit_code_of_the_guest_is_told_from_qemus_own() {
        let ended = |code: i32| guest_code(ExitStatus::from_raw(code << 8));
        assert_eq!((ended(1), ended(3), ended(0)), (Some(0), Some(1), None));
        assert_eq!(guest_code(ExitStatus::from_raw(9)), None);
    }
}
