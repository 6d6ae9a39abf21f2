//! A server that has both drives, and its clients.

use std::fs;
use std::process::Child;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use objstore::{BlockId, BlockKey, KvShape, Namespace};
use ripieno_serve::{Client, ServeError, SpaceId};

use crate::drive::{pattern, same};
use crate::hardware::{DRIVE_A, DRIVE_B};
use crate::kmsg::Kmsg;
use crate::pci;
use crate::program::{self, ROLE};
use crate::runner::until;

const SOCKET: &str = "/run/ripieno.sock";
const CONFIG: &str = "/run/ripieno.toml";
/// Of the model `tiny`.
const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 1024, block_tokens: 512 };
/// Blocks of a client: the keys that it stores, and as many to load into.
const BLOCKS: u32 = 64;
const KEYS: u32 = BLOCKS / 2;

/// Clients store and load at once, some are killed in the middle, and then the server is: what was
/// stored is found with its bytes, and no device writes where it may not.
pub fn clients_of_a_server_share_both_drives() -> Result<()> {
    let mut log = Kmsg::from_now()?;
    make_store("")?;
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
    until("the killed clients are gone", || {
        let report = program::run("ripieno", &status)?.success()?.json()?;
        ensure!(report["refused_calls"] == 0, "{report}");
        Ok(report["sessions"].as_array().context("no sessions")?.len() == 2)
    })?;
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

/// Blocks that one client stored, or that were read ahead, are copied to another client, and the
/// drives do not read them again; blocks that had no room are read, and are right as well.
pub fn a_server_keeps_blocks_of_both_drives_in_memory() -> Result<()> {
    let mut log = Kmsg::from_now()?;
    let hits = u64::from(KEYS);
    // For the keys of one call.
    make_store(&format!("dram = '{}'\n", hits * SHAPE.block_bytes()))?;
    let mut server = serve()?;
    let (one, other) = (connect()?, connect()?);
    store(&one, 0)?;
    ensure!(found(&other, 0)? == KEYS as usize, "a client does not find another one's blocks");
    ensure!(counter("dram_hit_blocks_total")? == hits, "they were read");
    store(&one, 1000)?;
    ensure!(found(&other, 1000)? == KEYS as usize && found(&other, 0)? == KEYS as usize);
    for name in ["dram_evicted_blocks_total", "dram_miss_blocks_total"] {
        ensure!(counter(name)? > 0, "{name}: the cache has room for both");
    }
    server.kill()?;
    server.wait()?;
    // The cache is empty then; the next server reads ahead.
    server = serve()?;
    one.reconnect()?;
    // The namespace of these clients is the server's own, the first one.
    let hex = |key: &BlockKey| key.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let words: Vec<String> = keys(1000).iter().map(hex).collect();
    let mut ahead = vec!["ctl", "--socket", SOCKET, "prefetch", "--namespace", "0"];
    ahead.extend(words.iter().map(String::as_str));
    program::run("ripieno", &ahead)?.success()?;
    until("they are read ahead", || {
        Ok(counter("dram_prefetched_bytes_total")? >= hits * SHAPE.block_bytes())
    })?;
    ensure!(found(&one, 1000)? == KEYS as usize, "a block did not survive the server");
    ensure!(counter("dram_hit_blocks_total")? == hits, "they were read again");
    server.kill()?;
    server.wait()?;
    let stray = log.lines().into_iter().find(|line| line.contains("DMAR: [DMA"));
    ensure!(stray.is_none(), "{stray:?}");
    Ok(())
}

/// Blocks that a client of a server on these devices stores are found by another client, and after
/// the server was killed.
pub fn is_found_on(devices: &str) -> Result<()> {
    make_store_on(devices, "")?;
    let mut server = serve()?;
    let (one, other) = (connect()?, connect()?);
    store(&one, 0)?;
    ensure!(found(&other, 0)? == KEYS as usize, "a client does not find another one's blocks");
    ensure!(counter("read_bytes_total")? > 0, "nothing was read");
    server.kill()?;
    server.wait()?;
    server = serve()?;
    one.reconnect()?;
    let kept = found(&one, 0);
    server.kill()?;
    server.wait()?;
    ensure!(kept? == KEYS as usize, "a block did not survive the server");
    Ok(())
}

/// Makes a store on both drives, and the configuration of its server with these lines.
fn make_store(more: &str) -> Result<()> {
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B])?;
    make_store_on(&format!("vfio:{DRIVE_A},vfio:{DRIVE_B}"), more)
}

fn make_store_on(device: &str, more: &str) -> Result<()> {
    let format = ["format", "--model", "tiny", "--devices", device, "--overwrite", "anything"];
    // Below the LBA that fails reads.
    let small = ["--capacity", "5MiB"];
    program::run("ripieno", &[&format[..], &small].concat())?.success()?;
    fs::write(
        CONFIG,
        format!(
            "socket = '{SOCKET}'\n[store]\ndevices = '{device}'\n{more}[shape]\n\
             layers = 2\nsegments = 2\nobject_bytes = 1024\nblock_tokens = 512\n"
        ),
    )?;
    Ok(())
}

/// Returns a counter of the server.
fn counter(name: &str) -> Result<u64> {
    let text = program::run("ripieno", &["ctl", "--socket", SOCKET, "metrics"])?.success()?.out;
    let line = text.lines().find_map(|line| line.strip_prefix("ripieno_")?.strip_prefix(name));
    let value = line.with_context(|| format!("no {name} in {text}"))?.trim();
    value.parse().with_context(|| format!("{name}: {value}"))
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
    until("the server answers", || Ok(Client::connect(SOCKET, SHAPE, 1).is_ok()))?;
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
    let found = found.into_iter().filter(|is_found| *is_found).count();
    for (number, block) in (first..).zip(&blocks[..found]) {
        same("a loaded block", &client.read(*block)?, &bytes(number))?;
    }
    Ok(found)
}
