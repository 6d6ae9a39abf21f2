//! `bench served`: a client of a server against the same store in the server's own process.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::mpsc::{self, TryRecvError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use objstore::{BlockId, BlockKey, KeyChain, KvShape, Layer, Namespace, Store};
use ripieno_serve::{Client, PinLimits, Server, ServerOptions, Settings};
use ripieno_stack::{Builder, PoolMemory, Request, StackConfig};

use crate::{
    file::folder,
    report::{Ratio, Report},
    sample::{Sides, timed},
    stack::scattered,
};

/// Layers, bytes of an object, and objects of a layer: the least I/O; 512 tokens, and 8,192 tokens
/// of a quarter of Llama-3-8B in blocks of 64 with keys and values together.
const LOADS: [(u32, u32, u32); 3] = [(32, 4 << 10, 1), (8, 256 << 10, 8), (8, 256 << 10, 128)];

/// Arguments of `served`.
#[derive(clap::Args, Debug)]
pub struct ServedArgs {
    /// Directory of the store and of the socket, on a file system with direct I/O
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    dir: PathBuf,
    /// Rounds of each measurement; the two sides alternate
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(3..))]
    rounds: u32,
}

/// Measures everything.
pub fn run(args: &ServedArgs) -> Result<Report> {
    let mut report = Report::new("served");
    for (layers, object_bytes, objects) in LOADS {
        let folder = folder(&args.dir)?;
        let shape = KvShape { layers, segments: 1, object_bytes, block_tokens: 64 };
        let name = format!("{layers} layers of {objects} x {} KiB", object_bytes >> 10);
        report.progress(&name);
        let found =
            Load::new(shape, objects).measure(folder.path(), args.rounds).context(name.clone())?;
        for (what, sides) in found.0 {
            report.ratios.push(Ratio::rounds(format!("{what}, {name}"), "us", &sides));
        }
    }
    report.notes.push(
        "ours: a client of a server; against: the server's own process, on the same devices; times \
         of one layer"
            .to_owned(),
    );
    Ok(report)
}

/// Microseconds of a client, and of the server's own process, by what was measured.
#[derive(Default)]
struct Found(BTreeMap<&'static str, Sides>);

impl Found {
    fn push(&mut self, what: &'static str, side: usize, took: Duration, layers: u32) {
        let us = took.as_secs_f64() * 1e6 / f64::from(layers);
        let Sides { ours, theirs } = self.0.entry(what).or_default();
        [ours, theirs][side].push(us);
    }
}

struct Load {
    shape: KvShape,
    keys: Vec<BlockKey>,
    blocks: Vec<BlockId>,
}

impl Load {
    fn new(shape: KvShape, objects: u32) -> Self {
        let mut chain = KeyChain::new(b"bench");
        let keys = (0..objects).map(|block| chain.next(&[block])).collect();
        Self { shape, keys, blocks: scattered(objects) }
    }

    fn measure(&self, folder: &Path, rounds: u32) -> Result<Found> {
        let bytes = self.shape.block_bytes() * self.keys.len() as u64;
        let blocks = self.blocks.len() as u32;
        let capacity = Some((2 * bytes).max(64 << 20));
        let config = StackConfig { capacity, ..StackConfig::at(folder.join("store")) };
        let stack = Builder::new(config, self.shape).pool(PoolMemory::Own { blocks }).open()?;
        let store = stack.store().clone();
        let socket = folder.join("socket");
        let settings = Settings {
            users: Vec::new(),
            sessions_max: 1,
            pool_bytes_max: bytes,
            limits: BTreeMap::new(),
            hold_max: Duration::from_secs(600),
            pins: PinLimits::default(),
            token: None,
        };
        let options = ServerOptions { socket: socket.clone(), http: None, settings, reload: None };
        let server = Server::bind(stack, options)?;
        let (until, over) = mpsc::channel::<()>();
        let is_over = move || over.try_recv() == Err(TryRecvError::Disconnected);
        thread::scope(|scope| {
            let serving = scope.spawn(|| server.run(is_over));
            let found = Client::connect(socket, self.shape, blocks)
                .map_err(anyhow::Error::from)
                .and_then(|client| self.compare(&client, &store, rounds));
            drop((store, until));
            serving.join().expect("it does not panic")?;
            found
        })
    }

    fn compare(&self, client: &Client, store: &Store, rounds: u32) -> Result<Found> {
        let space = client.namespace(&Namespace::default())?;
        ensure!(client.save(space, &self.keys, &self.blocks)? == self.keys.len(), "no room");
        let prefix = [client.lookup(space, &self.keys)?.len(), store.lookup(&self.keys)?.len()];
        ensure!(prefix == [self.keys.len(); 2], "{prefix:?} blocks were found");
        let (mut found, layers) = (Found::default(), self.shape.layers);
        for _ in 0..rounds {
            let (prefix, took) = timed(|| client.lookup(space, &self.keys));
            found.push("a lookup", 0, took, 1);
            let request = client.retrieve(&prefix?, 0, &self.blocks)?;
            let start = || request.start_all(0..layers);
            moved(&mut found, (0, layers), start, || request.wait_all(0..layers))?;
            drop(request);
            let (prefix, took) = timed(|| store.lookup(&self.keys));
            found.push("a lookup", 1, took, 1);
            let request = Request::retrieve(store, &prefix?, 0, &self.blocks)?;
            let all = || (0..layers).map(Layer);
            let start = || all().try_for_each(|layer| request.start(layer));
            moved(&mut found, (1, layers), start, || {
                all().try_for_each(|layer| request.wait(layer).map(drop))
            })?;
        }
        Ok(found)
    }
}

/// Moves all layers, which are started before the first is awaited.
fn moved<E: Into<anyhow::Error>>(
    found: &mut Found,
    (side, layers): (usize, u32),
    start: impl Fn() -> Result<(), E>,
    wait: impl Fn() -> Result<(), E>,
) -> Result<()> {
    let (moved, all) = timed(|| {
        let (started, took) = timed(&start);
        found.push("start of a layer", side, took, layers);
        started.and_then(|()| wait())
    });
    found.push("a layer, loaded", side, all, layers);
    moved.map_err(Into::into)
}
