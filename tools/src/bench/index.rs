//! `ripieno bench index`: cost of the index by length of a context, against a plain hash map.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Instant;

use clap::Args;
use kv_catalog::{BlockKey, Catalog, CatalogConfig, KeyChain, Namespace, NamespaceId, PolicyKind};
use rand::rngs::SmallRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};
use ripieno_sim::median;

use super::PageFlags;
use super::contexts::TOKENS;
use super::report::{Report, Row, Value, spread};
use crate::config::OutputFlags;
use crate::interrupt::Interrupt;
use crate::machine;
use crate::progress::Progress;
use crate::size::{self, Size};

pub(super) const HELP: &str = "\
The catalog of a store with as many blocks as --files, without devices. For contexts of each length:
hash: the keys of its blocks, each of which depends on the one before. lookup: its longest stored
prefix, all of it. acquire: the same, held and released, as a load does. insert: begun, committed,
and its journal records made. map: the same keys in a std::collections::HashMap.

Examples:
  ripieno bench index
  ripieno bench index --files 10000000 --block-tokens 64 --html index.html

The paper's figure 3 has a hash table on a GPU take 9 to 24 times (insert) and 26 to 50 times
(lookup) as long as one on the CPU. The index is on the CPU, where one lookup serves all layers.

Exit codes:
  0    measured, and every lookup was right
  1    a lookup was wrong
  2    bad input: the command line, or too little memory
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); reports what was measured until then";

/// Blocks of a request while the catalog is filled.
const REQUEST: usize = 1000;
/// Bytes of records that a journal takes at a time.
const PIECE_BYTES: usize = 1 << 20;
/// Memory of a block in the catalog, the map, and the list of keys.
const BLOCK_BYTES: u64 = 400;
/// Columns of times: JSON key and head.
const TIMES: [(&str, &str); 6] = [
    ("hash_us", "hash"),
    ("lookup_us", "lookup"),
    ("map_lookup_us", "map lookup"),
    ("acquire_us", "acquire"),
    ("insert_us", "insert"),
    ("map_insert_us", "map insert"),
];

/// Flags of `ripieno bench index`.
#[derive(Debug, Args)]
pub(crate) struct IndexFlags {
    /// Blocks in the store
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1000000",
        help_heading = "Load", value_parser = size::count::<u32>(1000..=100_000_000))]
    files: Vec<u32>,

    /// Lengths of the contexts in tokens [default: 1024 to 131072 in powers of two]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Load",
        value_parser = size::count::<u32>(1..=1 << 24))]
    tokens: Vec<u32>,

    /// Tokens of a block
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Load",
        value_parser = size::count::<u32>(1..=1 << 16))]
    block_tokens: u32,

    /// Rounds that count; index and map take turns
    #[arg(long, value_name = "N", default_value_t = 15, help_heading = "Load",
        value_parser = size::count::<u32>(1..=1000))]
    rounds: u32,

    /// Seed of keys and places
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load",
        value_parser = size::count::<u64>(0..=u64::MAX))]
    seed: u64,

    #[command(flatten)]
    page: PageFlags,

    #[command(flatten)]
    pub(super) output: OutputFlags,
}

/// A catalog, and a map with the same keys.
struct Index {
    catalog: Catalog,
    namespace: NamespaceId,
    map: HashMap<[u8; 32], u32>,
    /// The blocks that were stored first, in order.
    keys: Vec<BlockKey>,
    random: SmallRng,
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64() * 1e6)
}

impl Index {
    /// Returns an index of `files` blocks with room for `more`.
    fn new(files: u32, more: u32, seed: u64) -> anyhow::Result<Self> {
        let mut catalog = Catalog::new(CatalogConfig {
            files: files + more,
            file_bytes: 1,
            ranks: 1,
            words_per_file: 0,
            namespaces_max: 1,
            journal: true,
            files_ahead: 0,
            seed,
            policy: PolicyKind::default(),
            write_budget: None,
        });
        let namespace = catalog.namespace(&Namespace::default())?;
        let map = HashMap::with_capacity((files + more) as usize);
        let random = SmallRng::seed_from_u64(seed);
        let mut index = Self { catalog, namespace, map, keys: Vec::new(), random };
        index.keys = index.new_keys(files as usize);
        for keys in index.keys.clone().chunks(REQUEST) {
            index.insert(keys)?;
            index.insert_into_map(keys);
        }
        Ok(index)
    }

    /// Returns keys that nothing has, as random as digests.
    fn new_keys(&mut self, count: usize) -> Vec<BlockKey> {
        let mut keys = vec![BlockKey([0; 32]); count];
        keys.iter_mut().for_each(|key| self.random.fill_bytes(&mut key.0));
        keys
    }

    fn insert(&mut self, keys: &[BlockKey]) -> anyhow::Result<()> {
        let write = self.catalog.begin(self.namespace, keys)?;
        self.catalog.written(write.id, 0, &[])?;
        self.catalog.commit(write.id)?;
        while self.catalog.pending(PIECE_BYTES).is_some() {}
        Ok(())
    }

    fn insert_into_map(&mut self, keys: &[BlockKey]) {
        let first = self.map.len() as u32;
        self.map.extend((first..).zip(keys).map(|(file, key)| (key.0, file)));
    }

    /// Measures a context once. Returns the times of [`TIMES`], and the number of blocks that each
    /// kind of lookup found.
    fn round(&mut self, tokens: u32, block: u32) -> anyhow::Result<([f64; 6], [usize; 3])> {
        let count = (tokens / block) as usize;
        let text: Vec<u32> = (0..tokens).map(|_| self.random.next_u32()).collect();
        let (hashed, hash) = timed(|| KeyChain::new(b"bench").keys(&text, block));
        black_box(hashed);
        let first = self.random.random_range(0..=self.keys.len() - count);
        let stored = &self.keys[first..first + count];
        let (found, lookup) = timed(|| self.catalog.lookup(self.namespace, stored));
        let in_map = || stored.iter().take_while(|key| self.map.contains_key(&key.0)).count();
        let (map_found, map_lookup) = timed(in_map);
        let (held, acquire) = timed(|| {
            let prefix = self.catalog.acquire(self.namespace, stored)?;
            self.catalog.release(prefix.id)?;
            anyhow::Ok(prefix.files.len())
        });
        let new = self.new_keys(count);
        let (inserted, insert) = timed(|| self.insert(&new));
        inserted?;
        let ((), map_insert) = timed(|| self.insert_into_map(&new));
        let times = [hash, lookup, map_lookup, acquire, insert, map_insert];
        Ok((times, [found?, map_found, held?]))
    }
}

/// Measures and reports. Returns the exit code.
///
/// # Errors
/// Returns a [`crate::problem::Problem`] for bad input, and an error of the catalog.
pub(super) fn run(flags: &IndexFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    flags.page.check()?;
    let lengths = if flags.tokens.is_empty() { &TOKENS[..] } else { &flags.tokens };
    let IndexFlags { block_tokens: block, rounds, .. } = *flags;
    let all: u64 = lengths.iter().map(|tokens| u64::from(tokens / block)).sum();
    let more = u32::try_from(all * u64::from(rounds + 1)).unwrap_or(u32::MAX / 2);
    let most = flags.files.iter().copied().max().unwrap_or(0);
    let needed = BLOCK_BYTES * (u64::from(most) + u64::from(more));
    let what = || format!("--files: about {} of memory are needed", Size(needed));
    machine::check_memory(needed, what, "give fewer --files, --tokens or --rounds")?;
    let mut report = Report::new("index");
    report.checked = "every lookup found all of its blocks".to_owned();
    report.axes = (vec![("tokens", "tokens", 1.0)], vec![("lookup_us", "us of a lookup", 1.0)]);
    let progress =
        Progress::new("contexts", flags.files.len() * lengths.len(), flags.output.shows_progress());
    for &files in &flags.files {
        let mut index = Index::new(files, more, flags.seed)?;
        for &tokens in lengths {
            progress.shows(report.rows.len(), || format!("{files} blocks, {tokens} tokens"));
            let count = tokens / block;
            if !(1..=files).contains(&count) {
                report.notes.push(format!("left out: {tokens} tokens of {files} blocks"));
                continue;
            }
            let mut samples = <[Vec<f64>; 6]>::default();
            let mut wrong = Vec::new();
            for round in 0..=rounds {
                if interrupt.asked() {
                    report.interrupted = true;
                    return report.finish(&flags.page, &flags.output, &interrupt);
                }
                let (times, found) = index.round(tokens, block)?;
                if found != [count as usize; 3] {
                    wrong.push(format!("{found:?} of {count} stored blocks were found"));
                }
                // The first round does not count.
                if round > 0 {
                    samples.iter_mut().zip(times).for_each(|(all, time)| all.push(time));
                }
            }
            let named = TIMES.iter().zip(&samples);
            let time = |it: &Vec<f64>| Value::Micros(median(it.clone()).unwrap_or(0.0));
            report.rows.push(Row {
                of: vec![
                    ("files", "files", Value::Count(files.into())),
                    ("tokens", "tokens", Value::Count(tokens.into())),
                ],
                figures: std::iter::once(("keys", "keys", Value::Count(count.into())))
                    .chain(named.map(|((key, head), all)| (*key, *head, time(all))))
                    .collect(),
                spread: spread(&samples[1]),
                wrong,
            });
        }
    }
    progress.finish();
    report.finish(&flags.page, &flags.output, &interrupt)
}
