//! A C program as a client of a server, which is killed under it. This program is also the server:
//! with `RIPIENO_SERVED_DIR`, of a store in that directory.

#![allow(clippy::print_stdout, reason = "the server reports to the one that started it")]

mod program;

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use objstore::KvShape;
use program::{compile, output};
use ripieno_serve::{PinLimits, Server, ServerOptions, Settings};
use ripieno_stack::{Builder, PoolMemory, StackConfig};

const DIR: &str = "RIPIENO_SERVED_DIR";
/// That of blocks.h.
const SHAPE: KvShape =
    KvShape { layers: 3, segments: 2, object_bytes: 4096 + 512, block_tokens: 16 };
const CAPACITY: u64 = 64 << 20;

fn main() -> ExitCode {
    if let Some(dir) = env::var_os(DIR) {
        serve(Path::new(&dir));
        return ExitCode::SUCCESS;
    }
    let test = Trial::test("clients_of_a_server_that_is_killed", clients_and_a_death);
    libtest_mimic::run(&Arguments::from_args(), vec![test]).exit_code()
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("ripieno.sock")
}

fn serve(dir: &Path) {
    let config = StackConfig { capacity: Some(CAPACITY), ..StackConfig::at(dir.join("store")) };
    let stack =
        Builder::new(config, SHAPE).pool(PoolMemory::Own { blocks: 2 }).open().expect("a store");
    let settings = Settings {
        users: Vec::new(),
        sessions_max: 8,
        pool_bytes_max: 1 << 30,
        limits: BTreeMap::new(),
        hold_max: Duration::from_secs(600),
        pins: PinLimits::default(),
        token: None,
    };
    let options = ServerOptions { socket: socket(dir), http: None, settings, reload: None };
    let server = Server::bind(stack, options).expect("a server");
    println!("ready");
    server.run(|| false).expect("a store that works");
}

/// A process, killed on drop.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server, and waits until it is ready.
fn start(dir: &Path) -> Process {
    let mut command = Command::new(env::current_exe().unwrap());
    let mut child = Process(command.env(DIR, dir).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

fn clients_and_a_death() -> Result<(), Failed> {
    let place = tempfile::tempdir()?;
    let program = compile(place.path(), "tests/served.c", true);
    let mut server = start(place.path());
    let mut command = Command::new(program);
    command.arg(socket(place.path())).arg(server.0.id().to_string());
    let clients = thread::spawn(move || output(&mut command));
    // Killed by the clients, unless they fail before.
    while server.0.try_wait()?.is_none() && !clients.is_finished() {
        thread::sleep(Duration::from_millis(1));
    }
    drop(server);
    let _next = start(place.path());
    clients.join().map_err(|_| "the clients failed")?;
    Ok(())
}
