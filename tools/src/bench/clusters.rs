//! `ripieno bench clusters`: reads of what a step of attention activates, as clusters of entries
//! and as single ones.

use clap::Args;
use kv_swarm::{Cluster, ClusterId, Clusters, Entry, Read};
use objstore::{BlockId, BlockKey, ClusterCopies, Layer, StoredClusters};
use ripieno_sim::{SwarmSteps, median};

use super::PageFlags;
use super::report::{Report, Row, Value, spread};
use super::session::{self, Session};
use crate::config::{ReplayFlags, StoreArgs, none_of};
use crate::devices::Devices;
use crate::interrupt::Interrupt;
use crate::model::Shape;
use crate::problem::Problem;
use crate::progress::Progress;
use crate::size;

pub(super) const HELP: &str = measurement_help!(
    "\
Each step reads 10 % of the 4,096 entries of a layer, of 4 KiB each: K and V of a token. They are
activated by the law of `ripieno sim swarm-11`, not by a model. entries: each is stored once, in the
order of the tokens, and it is known which ones are activated. clusters: Swarm's, with copies, the
best ones by their medoids until as many entries are there; recall: how many of those are activated.

A step is one operation. busiest: entries of a step's busiest device by the mean of all. Commands
and doorbells are those of a step; a doorbell has 32 commands at most.

Examples:
  ripieno bench clusters
  ripieno bench clusters --devices 4 --coalesce off        # a command for each entry
  ripieno bench clusters --device vfio:0000:65:00.0,vfio:0000:66:00.0 --overwrite"
);

const SHAPE: Shape =
    Shape { model: "entries", layers: 1, segments: 1, block_tokens: 1, object_bytes: 4096 };
/// Numbers of software controllers by default.
const DEVICES: [u32; 4] = [1, 2, 4, 8];
/// Blocks of the pool: more than a step reads.
const POOL: u32 = 1024;
const HINT: &str = "use fewer --devices";

/// Flags of `ripieno bench clusters`.
#[derive(Debug, Args)]
pub(crate) struct ClusterFlags {
    /// Steps that count
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Load",
        value_parser = size::count::<u32>(1..=10_000))]
    steps: u32,

    #[command(flatten)]
    page: PageFlags,

    #[command(flatten)]
    pub(super) replay: ReplayFlags,
}

impl ClusterFlags {
    fn check(&self) -> Result<(), Problem> {
        self.page.check()?;
        session::check(&self.replay, "bench clusters")?;
        let common = &self.replay.common;
        let given = [
            ("--model", !common.model.is_empty()),
            ("--block-tokens", !common.block_tokens.is_empty()),
            ("--pool-blocks", common.pool_blocks.is_some()),
            ("--dram", common.dram > 0),
        ];
        none_of(
            &given,
            "ripieno bench clusters has entries of 4 KiB, a pool for a step of them, and reads all \
             of them from the devices",
            "leave it out",
        )
    }

    /// Returns the arguments for each number of devices.
    fn args(&self) -> Result<Vec<StoreArgs>, Problem> {
        let mut args = StoreArgs::check(self.replay.clone(), false)?;
        args.shape = SHAPE;
        args.common.pool_blocks = Some(POOL);
        let with = |count: u32| {
            let mut args = args.clone();
            if let Devices::Emu(emu) = &mut args.devices {
                emu.count = count;
            }
            args
        };
        let counts = match &args.devices {
            Devices::Emu(_) if args.common.emu.devices.is_none() => DEVICES.to_vec(),
            devices => vec![devices.count()],
        };
        Ok(counts.into_iter().map(with).collect())
    }
}

/// Sums over the steps.
#[derive(Default)]
struct Sums {
    seconds: Vec<f64>,
    entries: u64,
    /// Those of the entries that were activated, and all that were.
    hits: u64,
    active: u64,
    /// Entries of the busiest device by the mean of all.
    busiest: f64,
    commands: u64,
    doorbells: u64,
    wrong: Vec<String>,
}

/// Measures and reports. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] for bad input, and an error if the stack fails.
pub(super) fn run(flags: &ClusterFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    flags.check()?;
    let all = flags.args()?;
    let swarm = SwarmSteps::new(flags.replay.common.seed, flags.steps as usize);
    let mut singles = Clusters::default();
    for medoid in (0..swarm.entries).map(Entry) {
        singles.open(Cluster { medoid, members: vec![medoid] });
    }
    let mut report = Report::new("clusters");
    report.axes =
        (vec![("devices", "devices", 1.0)], vec![("bytes_s", "GiB/s", f64::from(1 << 30))]);
    let progress = Progress::new("numbers of devices", all.len(), all[0].shows_progress());
    for (at, args) in all.iter().enumerate() {
        progress.shows(at, String::new);
        let copies = swarm.clusters.iter().map(|(_, it)| it.members.len() as u64).sum();
        let done = session::with(args, copies, None, &mut interrupt, HINT, |session| {
            let mut rows = Vec::new();
            for (name, clusters) in [("entries", &singles), ("clusters", &swarm.clusters)] {
                let Some(sums) = measure(session, &swarm, clusters)? else {
                    return Ok((rows, true));
                };
                rows.push(row(args.devices.count(), name, clusters, &sums));
            }
            Ok((rows, false))
        })?;
        report.setting = Some(done.setting);
        report.rows.extend(done.value.0);
        report.interrupted = done.value.1;
        if report.interrupted {
            break;
        }
    }
    progress.finish();
    report.finish(&flags.page, &flags.replay.common.output, &interrupt)
}

/// Stores clusters, and reads what each step wants. Returns `None` if interrupted.
fn measure(
    session: &mut Session<'_>,
    swarm: &SwarmSteps,
    clusters: &Clusters,
) -> anyhow::Result<Option<Sums>> {
    let stored = save(session, clusters)?;
    let (before, stats) = (session.counted()?, session.store.stats()?);
    let mut sums = Sums::default();
    let is_single = clusters.iter().all(|(_, cluster)| cluster.members.len() == 1);
    for step in &swarm.steps {
        if session.interrupt.asked() {
            return Ok(None);
        }
        // An entry and its cluster have the same number.
        let entries = || step.active.iter().map(|entry| ClusterId(entry.0)).collect();
        let wanted: Vec<ClusterId> = if is_single { entries() } else { step.wanted.clone() };
        let begin = session.clock.now();
        let reads = stored.reads(&wanted, |_| false);
        let blocks = session.pool.take(reads.iter().map(Vec::len).sum());
        load(session, &stored, &reads, &blocks)?;
        sums.seconds.push((session.clock.now() - begin).0 as f64 / 1e9);
        let is_active = |read: &&Read| step.active.contains(&read.entry);
        let entries = reads.iter().map(Vec::len).sum::<usize>();
        let most = reads.iter().map(Vec::len).max().unwrap_or(0);
        sums.busiest += (most * reads.len()) as f64 / entries.max(1) as f64;
        sums.entries += entries as u64;
        sums.hits += reads.iter().flatten().filter(is_active).count() as u64;
        sums.active += step.active.len() as u64;
    }
    let now = session.store.stats()?;
    sums.commands = now.commands - stats.commands;
    sums.doorbells = now.sq_doorbells - stats.sq_doorbells;
    sums.wrong = session.problems(&before)?;
    let ids: Vec<ClusterId> = clusters.iter().map(|(id, _)| id).take(POOL as usize / 64).collect();
    sums.wrong.extend(contents(session, &stored, &stored.reads(&ids, |_| false))?);
    drop(stored);
    session.store.clear()?;
    session.store.sync_journal()?;
    Ok(Some(sums))
}

/// Stores all copies of clusters, in parts as large as the pool.
fn save(session: &mut Session<'_>, clusters: &Clusters) -> anyhow::Result<StoredClusters> {
    let (store, keys) = (session.store.clone(), session.keys);
    let key = |entry: &Entry| keys[entry.0 as usize];
    let copies = ClusterCopies::new(&store, clusters.clone(), |entry| key(&entry));
    let reservation = copies.reserve(&store)?;
    let positions: Vec<u32> = (0..copies.entries.len() as u32).collect();
    let parts = positions.chunks(POOL as usize).zip(copies.entries.chunks(POOL as usize));
    for (positions, entries) in parts {
        let blocks = session.pool.take(positions.len());
        session.fill(&entries.iter().map(key).collect::<Vec<BlockKey>>(), &blocks)?;
        let fill = store.fill(&reservation, positions, &blocks)?;
        let ticket = store.store_layer_on(&fill, Layer(0), session.order())?;
        let ended = store.end(&[ticket.job])?;
        if let Some(failure) = ended.into_iter().find_map(|done| done.failure) {
            return Err(failure.into());
        }
    }
    store.commit_reservation(&reservation)?;
    store.sync_journal()?;
    Ok(copies.find(&store)?)
}

fn load(
    session: &mut Session<'_>,
    stored: &StoredClusters,
    reads: &[Vec<Read>],
    blocks: &[BlockId],
) -> anyhow::Result<()> {
    let load = stored.retrieve(&session.store, reads, blocks)?;
    let order = session.order();
    session.store.wait(session.store.retrieve_layer_on(&load, Layer(0), order)?)?;
    Ok(())
}

/// Reads entries again, and compares a sample. Returns the problem, if there is one.
fn contents(
    session: &mut Session<'_>,
    stored: &StoredClusters,
    reads: &[Vec<Read>],
) -> anyhow::Result<Option<String>> {
    let all = reads.iter().flatten();
    let keys: Vec<BlockKey> = all.map(|read| session.keys[read.entry.0 as usize]).collect();
    let blocks = session.pool.take(keys.len());
    let sample = session.sample(&keys, &blocks)?;
    load(session, stored, reads, &blocks)?;
    session.compare(sample)
}

fn row(devices: u32, name: &str, clusters: &Clusters, sums: &Sums) -> Row {
    let steps = sums.seconds.len() as f64;
    let each = |sum: u64| sum as f64 / steps;
    let copies: usize = clusters.iter().map(|(_, cluster)| cluster.members.len()).sum();
    let bytes = (sums.entries * u64::from(SHAPE.object_bytes)) as f64;
    let seconds = median(sums.seconds.clone()).unwrap_or(f64::INFINITY);
    Row {
        of: vec![
            ("devices", "devices", Value::Count(devices.into())),
            ("stored", "stored", Value::Text(name.to_owned())),
        ],
        figures: vec![
            ("copies", "copies", Value::Count(copies as u64)),
            ("recall", "recall", Value::Percent(sums.hits as f64 / sums.active.max(1) as f64)),
            ("entries", "read", Value::Whole(each(sums.entries))),
            ("commands", "commands", Value::Whole(each(sums.commands))),
            ("doorbells", "doorbells", Value::Ratio(each(sums.doorbells))),
            ("busiest", "busiest", Value::Ratio(sums.busiest / steps)),
            ("step_us", "a step", Value::Micros(1e6 * seconds)),
            ("bytes_s", "bandwidth", Value::BytesPerSecond(bytes / steps / seconds)),
        ],
        spread: spread(&sums.seconds),
        wrong: sums.wrong.clone(),
    }
}
