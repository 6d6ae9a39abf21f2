//! `ripieno bench layers`: whole contexts, stored and retrieved layer by layer.

use clap::Args;
use objstore::BlockId;
use ripieno_sim::median;

use super::PageFlags;
use super::report::{Report, Row, spread};
use super::session::{self, Done, Passes, Session};
use crate::config::{Descriptors, ReplayFlags, StoreArgs};
use crate::interrupt::Interrupt;
use crate::outcome::Value;
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

With --by-descriptors, each with SGLs and with PRPs, with commands for neighbouring objects merged
and with one command for each object. areas: the memory that the queues have for descriptors. lists:
what the commands of one pass put there, which the device reads; with SGLs at most that.

Examples:
  ripieno bench layers
  ripieno bench layers --model llama-3-8b,deepseek-v3-mla --tokens 1024,4096
  ripieno bench layers --path /var/tmp --block-tokens 64 --json
  ripieno bench layers --by-descriptors --block-tokens 64 --tokens 16384 --json
  ripieno bench layers --html layers.html
  ripieno bench layers --devices vfio:0000:65:00.0 --overwrite anything"
);

/// Lengths of contexts by default, in tokens.
const TOKENS: [u32; 8] =
    [1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];
/// Bytes of a page of PRPs, and of an entry of each kind of list.
const PAGE_BYTES: u64 = 4096;
const PRP_BYTES: u64 = 8;
const SGL_BYTES: u64 = 16;
const HINT: &str = "use another --model, or --path DIR";

/// Flags of `ripieno bench layers`.
#[derive(Debug, Args)]
pub(crate) struct ContextFlags {
    /// Lengths of the contexts in tokens [default: 1024 to 131072 in powers of two, as far as they
    /// fit; with --by-descriptors 4096]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Load",
        value_parser = size::count::<u32>(1..=1 << 24))]
    tokens: Vec<u32>,

    /// Passes over each context that count
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Load",
        value_parser = size::count::<u32>(1..=1000))]
    rounds: u32,

    /// Compare SGLs with PRPs, and merged commands with one for each object
    #[arg(long, help_heading = "Load", conflicts_with_all = ["descriptors", "coalesce"])]
    by_descriptors: bool,

    #[command(flatten)]
    page: PageFlags,

    #[command(flatten)]
    pub(super) replay: ReplayFlags,
}

/// Kind of data pointers, and the limit of merged commands, that `--by-descriptors` compares.
const KINDS: [(Descriptors, Option<u32>); 4] = [
    (Descriptors::Sgl, None),
    (Descriptors::Sgl, Some(0)),
    (Descriptors::Prp, None),
    (Descriptors::Prp, Some(0)),
];

impl ContextFlags {
    /// Returns the lengths of contexts, and the flags of each store.
    fn stores(&self) -> (Vec<u32>, Vec<ReplayFlags>) {
        let asked = |default: &[u32]| match &self.tokens[..] {
            [] => default.to_vec(),
            tokens => tokens.to_vec(),
        };
        if !self.by_descriptors {
            return (asked(&TOKENS), self.replay.each_shape(&[16, 64]));
        }
        let of = |flags: ReplayFlags| {
            KINDS.map(|kind| {
                let mut flags = flags.clone();
                (flags.common.descriptors, flags.common.coalesce) = kind;
                flags
            })
        };
        (asked(&[4096]), self.replay.each_shape(&[64]).into_iter().flat_map(of).collect())
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
        if !session.fill(keys, &blocks)? {
            return Ok(None);
        }
        let save = session.store.allocate(keys, &blocks)?;
        anyhow::ensure!(save.accepted() == count, "the store has no room for {count} blocks");
        let order = session.order();
        let stored =
            session.passes(self.rounds, |store, layer| store.start(&save, layer, order))?;
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
        let found = session.passes(self.rounds, |store, layer| store.start(&load, layer, order))?;
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

    /// Returns the row of some passes.
    fn row(&self, is_read: bool, passes: &Passes, by_descriptors: bool) -> Row {
        let seconds = median(passes.seconds.clone()).unwrap_or(f64::INFINITY);
        let direction = if is_read { "retrieve" } else { "store" };
        let layer_us = seconds / f64::from(self.args.shape.layers) * 1e6;
        let shape = &self.args.shape;
        let mut row = Row {
            of: vec![
                ("model", "model", Value::Text(shape.model.to_owned())),
                ("block_tokens", "block", Value::Count(shape.block_tokens.into())),
                ("tokens", "tokens", Value::Count(self.tokens.into())),
                ("direction", "direction", Value::Text(direction.to_owned())),
            ],
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
        };
        if by_descriptors {
            let (kind, coalesce) = (self.args.common.descriptors, self.args.common.coalesce);
            let merged = if coalesce.is_none() { "yes" } else { "no" };
            row.of.extend([
                ("descriptors", "pointers", Value::Text(crate::config::name(kind))),
                ("merged", "merged", Value::Text(merged.to_owned())),
            ]);
            row.figures.extend([
                ("area_bytes", "areas", Value::Bytes(areas(self.args))),
                ("list_bytes", "lists", Value::Bytes(lists(self, kind, passes.commands))),
            ]);
        }
        row
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
pub(super) fn layers(flags: &ContextFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    flags.page.check()?;
    session::check(&flags.replay, "bench layers")?;
    let (mut asked, stores) = flags.stores();
    asked.sort_unstable();
    let mut all = Report::new("layers");
    all.axes = (vec![("tokens", "tokens", 1.0)], vec![("bytes_s", "GiB/s", f64::from(1 << 30))]);
    for each in stores {
        // The store is that of the longest one that fits.
        let mut lengths = asked.clone();
        let mut left_out = Vec::new();
        let mut args = args_for(&each, lengths[lengths.len() - 1])?;
        while lengths.len() > 1 {
            let tokens = lengths[lengths.len() - 1];
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
        let Done { setting, value: (rows, interrupted), .. } =
            session::with(&args, longest.into(), None, &mut interrupt, HINT, |session| {
                let mut rows = Vec::new();
                for (at, &tokens) in lengths.iter().enumerate() {
                    progress.shows(at, || format!("{model}, {tokens} tokens"));
                    let context = Context { args: &args, tokens, rounds: flags.rounds };
                    let Some(moved) = context.measure(session)? else { return Ok((rows, true)) };
                    for (is_read, passes) in [(true, &moved[1]), (false, &moved[0])] {
                        rows.push(context.row(is_read, passes, flags.by_descriptors));
                    }
                }
                Ok((rows, false))
            })?;
        progress.finish();
        all.setting = Some(setting);
        all.rows.extend(rows);
        all.interrupted = interrupted;
        if all.interrupted {
            break;
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
