//! `ripieno bench caller`: CPU time of the engine's thread for a layer, by number of blocks.
//!
//! *held*: all layers are started ahead and wait for an event, as in an engine that runs ahead of
//! its GPU; nothing else competes for the processors. *running*: the I/O starts at once, so with
//! few processors the I/O kernel and the software controllers take the caller's cache and core.

use std::hint::black_box;
use std::time::Duration;

use clap::Args;
use gio_uring::Wait;
use objstore::{BlockId, Layer};
use ripieno_sim::median;
use rustix::time::ClockId;

use super::PageFlags;
use super::load::cpu;
use super::report::{Report, Row, Value, spread};
use super::session::{self, Session};
use crate::config::{ReplayFlags, StoreArgs};
use crate::interrupt::Interrupt;
use crate::pool::LAYERS_AHEAD;
use crate::progress::Progress;
use crate::size;

pub(super) const HELP: &str = measurement_help!(
    "\
The layers of a request are started one after the other, as an engine does, for requests of several
numbers of blocks in turns. a layer: CPU time of the thread that starts it. wake: that of a
request's first layer, which may wake the I/O kernel's thread; on a GPU nothing sleeps.

Examples:
  ripieno bench caller
  ripieno bench caller --blocks 64,65536 --executor cuda --launch resident"
);

/// Passes of one sample: CPU time is read only around them.
const PASSES: u32 = 16;
/// Long enough for the executor's threads to fall asleep, whatever the number of blocks.
const IDLE: Duration = Duration::from_millis(2);
/// Bytes read before each pass, so that all numbers of blocks start with the same cold cache: an
/// engine does other work between two layers.
const CACHE_BYTES: usize = 16 << 20;
const HINT: &str = "use fewer --blocks, another --model, or --media file:DIR";

/// Flags of `ripieno bench caller`.
#[derive(Debug, Args)]
pub(crate) struct CallerFlags {
    /// Numbers of blocks of a request
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "64,1024,8192",
        help_heading = "Load", value_parser = size::count::<u32>(1..=1 << 20))]
    blocks: Vec<u32>,

    /// Rounds; the numbers of blocks take turns
    #[arg(long, value_name = "N", default_value_t = 9, help_heading = "Load",
        value_parser = size::count::<u32>(1..=1000))]
    rounds: u32,

    #[command(flatten)]
    page: PageFlags,

    #[command(flatten)]
    pub(super) replay: ReplayFlags,
}

/// Nanoseconds of a number of blocks, by round.
#[derive(Default, Clone)]
struct Samples {
    layer: Vec<f64>,
    wake: Vec<f64>,
}

/// Measures and reports. Returns the exit code.
///
/// # Errors
/// Returns a [`crate::problem::Problem`] for bad input, and an error if the stack fails.
pub(super) fn run(flags: &CallerFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    flags.page.check()?;
    session::check(&flags.replay, "bench caller")?;
    let mut args = StoreArgs::check(flags.replay.clone().or_small(), false)?;
    let most = flags.blocks.iter().copied().max().unwrap_or(1);
    args.common.pool_blocks = Some(most);
    let mut report = Report::new("caller");
    report.axes = (vec![("blocks", "blocks", 1.0)], vec![("layer_ns", "ns of CPU a layer", 1.0)]);
    let done = session::with(&args, most.into(), None, &mut interrupt, HINT, |session| {
        let blocks = session.pool.take(most as usize);
        let keys = &session.keys[..most as usize];
        session.fill(keys, &blocks)?;
        session.save(keys, &blocks)?;
        let before = session.counted()?;
        let progress = Progress::new("rounds", 2 * flags.rounds as usize, args.shows_progress());
        let mut rows = Vec::new();
        for held in [true, false] {
            let mut all = vec![Samples::default(); flags.blocks.len()];
            for round in 0..=flags.rounds {
                progress.shows((round + u32::from(!held) * flags.rounds) as usize, String::new);
                for (count, samples) in flags.blocks.iter().zip(&mut all) {
                    if session.interrupt.asked() {
                        return Ok((rows, true));
                    }
                    let [wake, layer] = call(session, &blocks[..*count as usize], held)?;
                    // The first round does not count.
                    if round > 0 {
                        samples.wake.push(wake);
                        samples.layer.push(layer);
                    }
                }
            }
            let fewest = median(all[0].layer.clone()).unwrap_or(0.0);
            let measured = flags.blocks.iter().zip(&all);
            rows.extend(measured.map(|(count, samples)| row(*count, held, samples, fewest)));
        }
        progress.finish();
        let mut wrong = session.problems(&before)?;
        wrong.extend(session.contents(keys, &blocks)?);
        rows.iter_mut().for_each(|row: &mut Row| row.wrong.clone_from(&wrong));
        Ok((rows, false))
    })?;
    report.setting = Some(done.setting);
    (report.rows, report.interrupted) = done.value;
    report.finish(&flags.page, &flags.replay.common.output, &interrupt)
}

fn row(blocks: u32, held: bool, samples: &Samples, fewest: f64) -> Row {
    let layer = median(samples.layer.clone()).unwrap_or(0.0);
    let wake = median(samples.wake.clone()).unwrap_or(0.0);
    let io = if held { "held" } else { "running" };
    Row {
        of: vec![
            ("io", "I/O", Value::Text(io.to_owned())),
            ("blocks", "blocks", Value::Count(blocks.into())),
        ],
        figures: vec![
            ("layer_ns", "a layer", Value::Nanos(layer)),
            ("against_first", "against the first", Value::Ratio(layer / fewest.max(1.0))),
            ("wake_ns", "wake", Value::Nanos(wake)),
        ],
        spread: spread(&samples.layer),
        wrong: Vec::new(),
    }
}

/// Retrieves layers of some blocks, as many as may be in flight, [`PASSES`] times. Returns the
/// caller's CPU time in nanoseconds: of the first call of a pass, and of each other one.
fn call(session: &Session<'_>, blocks: &[BlockId], held: bool) -> anyhow::Result<[f64; 2]> {
    let (store, layers) = (&session.store, session.args.shape.layers.min(LAYERS_AHEAD as u32));
    let other = vec![1_u8; CACHE_BYTES];
    let (mut first, mut rest) = (0.0, 0.0);
    for _ in 0..PASSES {
        let event = store.plane().event()?;
        let wait = Wait { event: event.clone(), value: u32::from(held) };
        let prefix = store.lookup(&session.keys[..blocks.len()])?;
        anyhow::ensure!(prefix.len() == blocks.len(), "what was stored is not found");
        let load = store.retrieve(&prefix, blocks)?;
        let mut tickets = Vec::with_capacity(layers as usize);
        std::thread::sleep(IDLE);
        black_box(other.iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>());
        let start = cpu(ClockId::ThreadCPUTime);
        tickets.push(store.retrieve_layer_on(&load, Layer(0), &wait)?);
        let woken = cpu(ClockId::ThreadCPUTime);
        for layer in 1..layers {
            tickets.push(store.retrieve_layer_on(&load, Layer(layer), &wait)?);
        }
        rest += cpu(ClockId::ThreadCPUTime) - woken;
        first += woken - start;
        event.set(1);
        for ticket in tickets {
            store.wait(ticket)?;
        }
    }
    let mean = |seconds: f64, calls: u32| seconds * 1e9 / f64::from(calls);
    Ok([mean(first, PASSES), mean(rest, PASSES * (layers - 1).max(1))])
}
