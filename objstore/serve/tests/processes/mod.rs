//! A test program that is also the processes that it starts and kills: with `RIPIENO_ROLE`, it is a
//! client or a server on the directory `RIPIENO_DIR`. `RIPIENO_KILLS` is the number of clients that
//! are killed, `RIPIENO_SEED` decides which.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    ops::Range,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use libtest_mimic::Failed;
use objstore::BlockKey;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use ripieno_serve::{
    Control, ControlAddress, PinLimits, ServeError, Server, ServerOptions, Settings,
    control::Status,
};
use ripieno_stack::Stack;
use ripieno_testkit::{pattern, until};
use tempfile::TempDir;

const ROLE: &str = "RIPIENO_ROLE";
const DIR: &str = "RIPIENO_DIR";
const SEED: &str = "RIPIENO_SEED";

/// Keys of the clients.
pub const KEYS: u64 = 3000;
pub const CAPACITY: u64 = 32 << 20;

/// Returns the role of this process, if it is not the test itself.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

pub fn directory() -> PathBuf {
    PathBuf::from(std::env::var_os(DIR).expect("a directory"))
}

pub fn seed() -> u64 {
    std::env::var(SEED).expect("a seed").parse().expect("a number")
}

pub fn socket(dir: &Path) -> PathBuf {
    dir.join("ripieno.sock")
}

pub fn exit<E: std::fmt::Display>(result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A process, killed on drop.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn start(role: &str, dir: &Path, seed: u64) -> Process {
    let child = Command::new(std::env::current_exe().expect("this program"))
        .env(ROLE, role)
        .env(DIR, dir)
        .env(SEED, seed.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    Process(child.expect("a process"))
}

/// Starts a process, and waits until it writes a line, such as "ready".
pub fn started(role: &str, dir: &Path, seed: u64, wanted: &str) -> Process {
    let mut process = start(role, dir, seed);
    assert_eq!(line(&mut process), wanted, "seed {seed}");
    process
}

/// Returns the next line that a process writes.
pub fn line(process: &mut Process) -> String {
    let mut line = String::new();
    let out = process.0.stdout.as_mut().expect("its output");
    BufReader::new(out).read_line(&mut line).expect("its first line");
    line.trim_end().to_owned()
}

/// Returns keys, all different.
pub fn keys(range: Range<u64>) -> Vec<BlockKey> {
    let key = |seed| BlockKey(pattern(32, seed).try_into().expect("32 bytes"));
    range.map(key).collect()
}

pub fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").expect("the open files").count()
}

/// Returns how many mappings of this process have this in their name.
pub fn mappings(name: &str) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("the mappings");
    maps.lines().filter(|line| line.contains(name)).count()
}

pub fn settings() -> Settings {
    Settings {
        users: Vec::new(),
        // Killed clients count until the server notices it, late on a busy machine.
        sessions_max: 1000,
        pool_bytes_max: 1 << 30,
        limits: BTreeMap::new(),
        hold_max: Duration::from_secs(600),
        pins: PinLimits::default(),
        token: None,
    }
}

pub fn serve(dir: &Path, stack: Stack, settings: Settings) -> Server {
    let options = ServerOptions { socket: socket(dir), http: None, settings, reload: None };
    Server::bind(stack, options).expect("a server")
}

/// A server in this process.
pub struct Serving {
    pub dir: TempDir,
    stop: mpsc::Sender<()>,
    thread: thread::JoinHandle<Result<(), ServeError>>,
}

impl Serving {
    /// Serves what `open` opens in a new directory.
    pub fn new(open: impl FnOnce(&Path) -> Stack, settings: Settings) -> Self {
        let dir = TempDir::new().expect("a directory");
        let server = serve(dir.path(), open(dir.path()), settings);
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = thread::spawn(move || server.run(|| stopped.try_recv().is_ok()));
        Self { dir, stop, thread }
    }

    pub fn control(&self) -> Control {
        Control::new(ControlAddress::Unix(socket(self.dir.path())))
    }

    pub fn status(&self) -> Status {
        self.control().get("/status").expect("it is")
    }

    /// Waits until `ended` sessions have ended and nothing of a client is left.
    pub fn settled(&self, ended: u64) -> Status {
        let mut left = self.status();
        until("all sessions have ended", || {
            left = self.status();
            left.sessions_ended >= ended && left.sessions.is_empty()
        });
        assert_eq!((left.files_writing, left.files_referenced), (0, 0));
        left
    }

    pub fn close(self) -> Result<(), Failed> {
        self.stop.send(())?;
        self.thread.join().expect("it did not panic")?;
        Ok(())
    }
}

/// A client: works until its standard input ends. Exit code 3 after a wrong byte, which `work`
/// reports with false.
pub fn work_until_told<T>(
    open: impl FnOnce() -> Result<T, ServeError>,
    work: impl Fn(&T, &mut SmallRng) -> Result<bool, ServeError>,
) -> ExitCode {
    let seed = seed();
    let failed = |error| {
        eprintln!("seed {seed}: {error}");
        ExitCode::from(4)
    };
    let (over, is_over) = mpsc::channel();
    thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = over.send(());
    });
    let client = match open() {
        Ok(client) => client,
        Err(error) => return failed(error),
    };
    println!("ready");
    let mut random = SmallRng::seed_from_u64(seed);
    while is_over.try_recv().is_err() {
        match work(&client, &mut random) {
            Ok(true) => {}
            Ok(false) => {
                eprintln!("seed {seed}: wrong bytes");
                return ExitCode::from(3);
            }
            Err(error) => return failed(error),
        }
    }
    ExitCode::SUCCESS
}

/// Kills `count` working clients again and again, with pauses of up to `pause` microseconds, and
/// has the last ones end by themselves. Meanwhile `disturb` gets a client that lives.
pub fn kill_at_random(
    serving: &Serving,
    (count, kills): (usize, u32),
    pause: u64,
    disturb: impl Fn(&Child) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let kills = std::env::var("RIPIENO_KILLS").map_or(Ok(kills), |kills| kills.parse())?;
    let seed = ripieno_testkit::seed();
    let mut random = SmallRng::seed_from_u64(seed);
    println!("seed {seed}, {kills} kills");
    let mut next = 0;
    let mut another = || {
        next += 1;
        started("client", serving.dir.path(), seed.wrapping_add(next), "ready")
    };
    let mut clients: Vec<Process> = (0..count).map(|_| another()).collect();
    for _ in 0..kills {
        thread::sleep(Duration::from_micros(random.random_range(0..pause)));
        let client = &mut clients[random.random_range(0..count)];
        client.0.kill()?;
        let ended = client.0.wait()?;
        if ended.signal() != Some(libc::SIGKILL) {
            return Err(format!("seed {seed}: a client ended by itself: {ended}").into());
        }
        *client = another();
        disturb(&clients[random.random_range(0..count)].0)?;
    }
    for mut client in clients {
        drop(client.0.stdin.take());
        let ended = client.0.wait()?;
        if !ended.success() {
            return Err(format!("seed {seed}: a client that lived has {ended}").into());
        }
    }
    let left = serving.settled(u64::from(kills) + count as u64);
    assert!(left.files_stored > 0, "seed {seed}");
    assert_eq!(left.refused_calls + left.refused_messages + left.refused_users, 0, "seed {seed}");
    Ok(())
}
