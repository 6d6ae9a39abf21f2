//! A server that has both drives, and its clients.

use std::fs;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use objstore::{BlockId, BlockKey, KvShape, Namespace};
use ripieno_serve::{Client, ServeError, SpaceId};

use crate::drive::{pattern, same};
use crate::hardware::{DRIVE_A, DRIVE_B};
use crate::kmsg::Kmsg;
use crate::pci;
use crate::program::{self, ROLE};

const SOCKET: &str = "/run/ripieno.sock";
const CONFIG: &str = "/run/ripieno.toml";
/// Of the model `tiny`.
const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 1024, block_tokens: 512 };
/// Blocks of a client: the keys that it stores, and as many to load into.
const BLOCKS: u32 = 64;
const KEYS: u32 = BLOCKS / 2;
const TIMEOUT: Duration = Duration::from_secs(20);

/// Clients store and load at once, some are killed in the middle, and then the server is: what was
/// stored is found with its bytes, and no device writes where it may not.
pub fn clients_of_a_server_share_both_drives() -> Result<()> {
    let mut log = Kmsg::from_now()?;
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B])?;
    let device = format!("vfio:{DRIVE_A},vfio:{DRIVE_B}");
    let format = ["format", "--model", "tiny", "--device", &device, "--overwrite", "anything"];
    // Below the LBA that fails reads.
    let small = ["--capacity", "5MiB"];
    program::run("ripieno", &[&format[..], &small].concat())?.success()?;
    fs::write(
        CONFIG,
        format!(
            "socket = '{SOCKET}'\n[store]\ndrives = ['{DRIVE_A}', '{DRIVE_B}']\n[shape]\n\
             layers = 2\nsegments = 2\nobject_bytes = 1024\nblock_tokens = 512\n"
        ),
    )?;
    let mut server = serve()?;
    let (one, other) = (connect()?, connect()?);
    store(&one, 0)?;
    ensure!(found(&other, 0)? == KEYS as usize, "a client does not find another one's blocks");
    // The others store more than there is room for, and must not evict these.
    let kept = one.lookup(space(&one)?, &keys(0))?;
    for round in 1..=5 {
        let mut child = program::start("vm-tests", &[ROLE, "serve-client"])?;
        thread::sleep(Duration::from_millis(100 * round));
        ensure!(found(&one, 0)? == KEYS as usize, "a block is gone");
        child.kill()?;
        child.wait()?;
    }
    let status = ["ctl", "--socket", SOCKET, "--json", "status"];
    let until = Instant::now() + TIMEOUT;
    loop {
        let report = program::run("ripieno", &status)?.success()?.json()?;
        if report["sessions"].as_array().context("no sessions")?.len() == 2 {
            ensure!(report["refused_calls"] == 0, "{report}");
            break;
        }
        ensure!(Instant::now() < until, "killed clients are there: {report}");
        thread::sleep(Duration::from_millis(50));
    }
    drop(kept);
    server.kill()?;
    server.wait()?;
    ensure!(found(&one, 0).is_err(), "the server is gone");
    server = serve()?;
    one.reconnect()?;
    ensure!(found(&one, 0)? == KEYS as usize, "a block did not survive the server");
    server.kill()?;
    server.wait()?;
    let stray = log.lines().into_iter().find(|line| line.contains("DMAR: [DMA"));
    ensure!(stray.is_none(), "{stray:?}");
    Ok(())
}

/// Stores and loads until it is killed.
pub fn client() -> Result<()> {
    let client = connect()?;
    for first in (1..).map(|round| 1000 * round) {
        store(&client, first)?;
        found(&client, first)?;
    }
    Ok(())
}

fn serve() -> Result<Child> {
    let child = program::start_talking("ripieno", &["serve", "--config", CONFIG])?;
    let until = Instant::now() + TIMEOUT;
    while Client::connect(SOCKET, SHAPE, 1).is_err() {
        ensure!(Instant::now() < until, "the server does not answer");
        thread::sleep(Duration::from_millis(50));
    }
    Ok(child)
}

fn connect() -> Result<Client> {
    Ok(Client::connect(SOCKET, SHAPE, BLOCKS)?)
}

fn space(client: &Client) -> Result<SpaceId, ServeError> {
    client.namespace(&Namespace { label: "vm".to_owned(), ..Namespace::default() })
}

fn key(number: u32) -> BlockKey {
    let mut bytes = [7; 32];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

fn keys(first: u32) -> Vec<BlockKey> {
    (first..first + KEYS).map(key).collect()
}

fn bytes(number: u32) -> Vec<u8> {
    pattern(u64::from(number) + 1, SHAPE.block_bytes() as usize)
}

fn store(client: &Client, first: u32) -> Result<()> {
    let blocks: Vec<BlockId> = (0..KEYS).map(BlockId).collect();
    for (number, block) in (first..).zip(&blocks) {
        client.write(*block, &bytes(number))?;
    }
    client.save(space(client)?, &keys(first), &blocks)?;
    Ok(())
}

/// Loads keys, and returns how many were found, with their own bytes.
fn found(client: &Client, first: u32) -> Result<usize> {
    let blocks: Vec<BlockId> = (KEYS..BLOCKS).map(BlockId).collect();
    let found = client.load(space(client)?, &keys(first), &blocks)?;
    for (number, block) in (first..).zip(&blocks[..found]) {
        same("a loaded block", &client.read(*block)?, &bytes(number))?;
    }
    Ok(found)
}
