//! `ripieno bench layers` and `descriptors`: whole contexts, stored and retrieved layer by layer.

use clap::Args;
use objstore::BlockId;
use ripieno_sim::median;

use super::PageFlags;
use super::measure::{Measure, SLOTS};
use super::report::{Report, Row, Value, spread};
use super::session::{self, Done, Passes, Session};
use crate::config::{Descriptors, ReplayFlags, StoreArgs};
use crate::interrupt::Interrupt;
use crate::problem::Problem;
use crate::progress::Progress;
use crate::replay;
use crate::size::{self, grouped};
use crate::sizing::Sizing;

pub(super) const LAYERS_HELP: &str = measurement_help!(
    "\
A context of each length is stored and retrieved, all layers of it, into scattered blocks of the KV
pool; eight layers are in flight. The first pass does not count. Lengths for which this machine has
no memory or disk space are left out, and named.

Examples:
  ripieno bench layers
  ripieno bench layers --model llama-3-8b,deepseek-v3-mla --tokens 1024,4096
  ripieno bench layers --media file:/var/tmp --block-tokens 64 --json
  ripieno bench layers --html layers.html
  ripieno bench layers --device vfio:0000:65:00.0 --overwrite"
);

pub(super) const DESCRIPTORS_HELP: &str = measurement_help!(
    "\
The same context with SGLs and with PRPs, with commands for neighbouring objects merged and with one
command for each object.

Examples:
  ripieno bench descriptors
  ripieno bench descriptors --block-tokens 64 --tokens 16384 --json

areas: the memory that the queues have for descriptors. lists: what the commands of one pass put
there, which the device reads; with SGLs at most that."
);

pub(super) const MIXED_HELP: &str = "\
Four operations of the same size are kept in flight, from reads only to writes only. apart: the
bandwidth of the same bytes, first all reads and then all writes. factor: together relative to
apart; below 1, the device likes reads and writes apart. The scheduler's table (ripieno bench table)
has the factor of two reads and two writes.

Examples:
  ripieno bench mixed
  ripieno bench mixed --device vfio:0000:65:00.0 --overwrite

Exit codes:
  0    measured, and every check passed
  1    I/O failed, or a measurement did not pass its checks
  2    bad input: the command line, or something that this machine does not have
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); there is no result then";

/// Lengths of contexts by default, in tokens.
pub(super) const TOKENS: [u32; 8] =
    [1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];
/// Bytes of a page of PRPs, and of an entry of each kind of list.
const PAGE_BYTES: u64 = 4096;
const PRP_BYTES: u64 = 8;
const SGL_BYTES: u64 = 16;
const HINT: &str = "use another --model, or --media file:DIR";

/// Flags of `ripieno bench layers` and `descriptors`.
#[derive(Debug, Args)]
pub(crate) struct ContextFlags {
    /// Lengths of the contexts in tokens [default: layers: 1024 to 131072 in powers of two, as far
    /// as they fit; descriptors: 4096]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Load",
        value_parser = size::count::<u32>(1..=1 << 24))]
    tokens: Vec<u32>,

    /// Passes over each context that count
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Load",
        value_parser = size::count::<u32>(1..=1000))]
    rounds: u32,

    #[command(flatten)]
    page: PageFlags,

    #[command(flatten)]
    pub(super) replay: ReplayFlags,
}

impl ContextFlags {
    fn check(&self, command: &str) -> anyhow::Result<()> {
        self.page.check()?;
        Ok(session::check(&self.replay, command)?)
    }
}

/// A context in a session.
struct Context<'a> {
    args: &'a StoreArgs,
    tokens: u32,
    rounds: u32,
}

impl Context<'_> {
    fn blocks(&self) -> u32 {
        self.tokens.div_ceil(self.args.shape.block_tokens)
    }

    /// Returns the objects of all layers.
    fn objects(&self) -> u64 {
        u64::from(self.blocks()) * u64::from(self.args.shape.rows())
    }

    fn bytes(&self) -> u64 {
        self.objects() * u64::from(self.args.shape.object_bytes)
    }

    /// Stores and retrieves it. Returns the passes of both; `None` if interrupted.
    fn measure(&self, session: &mut Session<'_>) -> anyhow::Result<Option<[Passes; 2]>> {
        let count = self.blocks() as usize;
        let (keys, blocks) = (&session.keys[..count], session.pool.take(count));
        session.fill(keys, &blocks)?;
        let save = session.store.allocate(keys, &blocks)?;
        anyhow::ensure!(save.accepted() == count, "the store has no room for {count} blocks");
        let order = session.order();
        let stored = session
            .passes(self.rounds, |store, layer| store.store_layer_on(&save, layer, order))?;
        let Some(mut stored) = stored else { return Ok(None) };
        session.store.commit(save)?;
        session.store.sync_journal()?;
        // Each block is retrieved to another one's place.
        let blocks: Vec<BlockId> = blocks.into_iter().rev().collect();
        let sample = session.sample(keys, &blocks)?;
        let order = session.order();
        let prefix = session.store.lookup(keys)?;
        anyhow::ensure!(prefix.len() == count, "what was stored is not found");
        let load = session.store.retrieve(&prefix, &blocks)?;
        let found = session
            .passes(self.rounds, |store, layer| store.retrieve_layer_on(&load, layer, order))?;
        let Some(mut found) = found else { return Ok(None) };
        if let Some(wrong) = session.compare(sample)? {
            stored.wrong.push(wrong.clone());
            found.wrong.push(wrong);
        }
        drop((load, prefix));
        session.store.clear()?;
        session.store.sync_journal()?;
        Ok(Some([stored, found]))
    }

    /// Returns the row of some passes, without those of its parameters that `of` does not name.
    fn row(&self, is_read: bool, passes: &Passes) -> Row {
        let seconds = median(passes.seconds.clone()).unwrap_or(f64::INFINITY);
        let direction = if is_read { "retrieve" } else { "store" };
        let layer_us = seconds / f64::from(self.args.shape.layers) * 1e6;
        Row {
            of: vec![("direction", "direction", Value::Text(direction.to_owned()))],
            figures: vec![
                ("bytes_s", "bandwidth", Value::BytesPerSecond(self.bytes() as f64 / seconds)),
                ("layer_us", "a layer", Value::Micros(layer_us)),
                ("commands", "commands", Value::Count(passes.commands as u64)),
                ("doorbells", "doorbells", Value::Count(passes.doorbells as u64)),
                (
                    "commands_per_doorbell",
                    "cmd/bell",
                    Value::Ratio(passes.commands / passes.doorbells.max(1.0)),
                ),
            ],
            spread: spread(&passes.seconds),
            wrong: passes.wrong.clone(),
        }
    }

    /// Returns true if this machine has the memory or disk space for it.
    fn fits(&self) -> bool {
        let plan = session::plan(self.args, self.blocks().into());
        let lba_bytes = replay::lba_bytes(self.args, None);
        Sizing::new(self.args, &plan, lba_bytes)
            .is_ok_and(|sizing| sizing.check_machine(self.args, false).is_ok())
    }
}

/// Returns the arguments for contexts of up to `tokens` tokens.
fn args_for(flags: &ReplayFlags, tokens: u32) -> Result<StoreArgs, Problem> {
    let mut args = StoreArgs::check(flags.clone(), false)?;
    args.common.pool_blocks = Some(tokens.div_ceil(args.shape.block_tokens));
    Ok(args)
}

/// Runs `ripieno bench layers`. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] for bad input, and an error if the stack fails.
pub(super) fn layers(flags: &ContextFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    flags.check("bench layers")?;
    let asked = if flags.tokens.is_empty() { TOKENS.to_vec() } else { flags.tokens.clone() };
    let mut all = Report::new("layers");
    all.axes = (vec![("tokens", "tokens", 1.0)], vec![("bytes_s", "GiB/s", f64::from(1 << 30))]);
    for each in flags.replay.each_shape(&[16, 64]) {
        // The store is that of the longest one that fits.
        let mut lengths = asked.clone();
        lengths.sort_unstable();
        let mut left_out = Vec::new();
        let mut args = args_for(&each, lengths[lengths.len() - 1])?;
        while lengths.len() > 1 {
            let tokens = lengths[lengths.len() - 1];
            args = args_for(&each, tokens)?;
            if (Context { args: &args, tokens, rounds: 1 }).fits() {
                break;
            }
            left_out.extend(lengths.pop());
            args = args_for(&each, lengths[lengths.len() - 1])?;
        }
        let (model, block) = (args.shape.model, args.shape.block_tokens);
        if let Some(shortest) = left_out.last() {
            all.notes.push(format!(
                "left out: {model} in blocks of {block}, from {} tokens on: store and KV pool do \
                 not fit this machine's memory or disk",
                grouped((*shortest).into())
            ));
        }
        let longest = lengths[lengths.len() - 1].div_ceil(block);
        let progress = Progress::new("contexts", lengths.len(), args.shows_progress());
        let Done { setting, value, .. } =
            session::with(&args, longest.into(), None, &mut interrupt, HINT, |session| {
                let mut rows = Vec::new();
                for (at, &tokens) in lengths.iter().enumerate() {
                    progress.shows(at, || format!("{model}, {tokens} tokens"));
                    let context = Context { args: &args, tokens, rounds: flags.rounds };
                    let Some(moved) = context.measure(session)? else { return Ok((rows, true)) };
                    for (is_read, passes) in [(true, &moved[1]), (false, &moved[0])] {
                        let mut row = context.row(is_read, passes);
                        row.of.splice(
                            0..0,
                            [
                                ("model", "model", Value::Text(model.to_owned())),
                                ("block_tokens", "block", Value::Count(block.into())),
                                ("tokens", "tokens", Value::Count(tokens.into())),
                            ],
                        );
                        rows.push(row);
                    }
                }
                Ok((rows, false))
            })?;
        progress.finish();
        all.setting = Some(setting);
        all.rows.extend(value.0);
        all.interrupted = value.1;
        if all.interrupted {
            break;
        }
    }
    all.finish(&flags.page, &flags.replay.common.output, &interrupt)
}

/// Runs `ripieno bench descriptors`. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] for bad input, and an error if the stack fails.
pub(super) fn descriptors(flags: &ContextFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    flags.check("bench descriptors")?;
    let common = &flags.replay.common;
    if common.coalesce.is_some() || common.descriptors != Descriptors::Auto {
        let hint = "leave them out; ripieno bench layers takes them";
        return Err(
            Problem::new("--descriptors, --coalesce: each of them is measured", hint).into()
        );
    }
    let tokens = match flags.tokens[..] {
        [] => 4096,
        [tokens] => tokens,
        _ => return Err(Problem::new("--tokens: name one length", "").into()),
    };
    let mut all = Report::new("descriptors");
    for (kind, coalesce) in [
        (Descriptors::Sgl, None),
        (Descriptors::Sgl, Some(0)),
        (Descriptors::Prp, None),
        (Descriptors::Prp, Some(0)),
    ] {
        let mut each = flags.replay.clone();
        (each.common.descriptors, each.common.coalesce) = (kind, coalesce);
        let args = args_for(&each, tokens)?;
        let context = Context { args: &args, tokens, rounds: flags.rounds };
        let blocks = context.blocks().into();
        let Done { setting, value, .. } =
            session::with(&args, blocks, None, &mut interrupt, HINT, |session| {
                context.measure(session)
            })?;
        all.setting = Some(setting);
        let Some(moved) = value else {
            all.interrupted = true;
            break;
        };
        for (is_read, passes) in [(true, &moved[1]), (false, &moved[0])] {
            let mut row = context.row(is_read, passes);
            let merged = if coalesce.is_none() { "yes" } else { "no" };
            row.of.splice(
                0..0,
                [
                    ("descriptors", "pointers", Value::Text(crate::config::name(kind))),
                    ("merged", "merged", Value::Text(merged.to_owned())),
                ],
            );
            row.figures.extend([
                ("area_bytes", "areas", Value::Bytes(areas(&args))),
                ("list_bytes", "lists", Value::Bytes(lists(&context, kind, passes.commands))),
            ]);
            all.rows.push(row);
        }
    }
    all.finish(&flags.page, &flags.replay.common.output, &interrupt)
}

/// Returns the bytes that the queues have for descriptors.
fn areas(args: &StoreArgs) -> u64 {
    let options = args.controller_options();
    let entries = u64::from(options.io_queues) * u64::from(options.io_depth);
    entries * u64::from(options.descriptor_bytes) * u64::from(args.devices.count())
}

/// Returns the bytes of lists for a pass of `commands` commands; with SGLs at most.
fn lists(context: &Context<'_>, kind: Descriptors, commands: f64) -> u64 {
    let (objects, commands) = (context.objects(), commands as u64);
    if kind == Descriptors::Sgl {
        // A single object is described in the command.
        return if commands < objects { objects * SGL_BYTES } else { 0 };
    }
    // The first page of a command is in the command; a second one, too, if it is the last.
    let pages = objects * u64::from(context.args.shape.object_bytes).div_ceil(PAGE_BYTES);
    if pages <= 2 * commands { 0 } else { (pages - commands) * PRP_BYTES }
}

/// Runs `ripieno bench mixed`. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] for bad input, and an error if the stack fails.
pub(super) fn mixed(flags: &ReplayFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    session::check(flags, "bench mixed")?;
    let args = StoreArgs::check(flags.clone(), false)?;
    let done = Measure::with(&args, None, &mut interrupt, |measure, in_flight| {
        let before = measure.session.counted()?;
        let Some(found) = measure.mixes(in_flight)? else { return Ok(None) };
        let mut wrong = measure.session.problems(&before)?;
        wrong.extend(measure.contents()?);
        Ok(Some((found, wrong)))
    })?;
    let mut all = Report::new("mixed");
    all.setting = Some(done.setting);
    let Some((mixes, wrong)) = done.value else {
        all.interrupted = true;
        return all.finish(&PageFlags::default(), &flags.common.output, &interrupt);
    };
    let alone = |reads| mixes.iter().find(|mix| mix.reads == reads).map_or(0.0, |mix| mix.bytes_s);
    for mix in &mixes {
        let seconds = mix.read_bytes_s / alone(1.0) + mix.write_bytes_s / alone(0.0);
        let rate = Value::BytesPerSecond;
        let reads = (mix.reads * f64::from(SLOTS)) as u64;
        all.rows.push(Row {
            of: vec![
                ("reads", "reads", Value::Count(reads)),
                ("writes", "writes", Value::Count(u64::from(SLOTS) - reads)),
            ],
            figures: vec![
                ("bytes_s", "together", rate(mix.bytes_s)),
                ("read_bytes_s", "of it read", rate(mix.read_bytes_s)),
                ("write_bytes_s", "written", rate(mix.write_bytes_s)),
                ("apart_bytes_s", "apart", rate(mix.bytes_s / seconds)),
                ("factor", "factor", Value::Ratio(seconds)),
            ],
            spread: spread(&mix.windows),
            wrong: wrong.clone(),
        });
    }
    all.finish(&PageFlags::default(), &flags.common.output, &interrupt)
}
