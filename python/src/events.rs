//! Forwards `tracing` events of the crates below to Python's `logging`.
//!
//! A thread of ours may log while another one waits for it and holds the GIL, for example when a
//! store is dropped. So an event never takes the GIL. It is queued, and a Python thread
//! (`ripieno/_logging.py`) takes it from the queue.

use std::{
    collections::VecDeque,
    fmt::{self, Write as _},
    sync::{Condvar, Mutex, MutexGuard, OnceLock},
    time::{Duration, SystemTime},
};

use pyo3::prelude::*;
use tracing::{
    Event, Level, Metadata, Subscriber, callsite,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
};

use crate::arguments::unpoisoned;

/// Maximum number of queued events; further ones are only counted.
const EVENTS_MAX: usize = 1000;

/// `created`, in seconds since 1970; Python's level; target; file; line; message.
type Record = (f64, u8, &'static str, &'static str, u32, String);

struct Queue {
    records: VecDeque<Record>,
    lost: u64,
    ended: bool,
    level: LevelFilter,
}

/// Queues of this process and those that it was forked from, with their numbers: another thread may
/// have one locked during a fork, and is not in the child. Processes beyond the last one share it.
static QUEUES: [(OnceLock<u32>, Mutex<Queue>); 8] =
    [const { (OnceLock::new(), Mutex::new(Queue::new())) }; 8];
static ARRIVED: Condvar = Condvar::new();

impl Queue {
    const fn new() -> Self {
        Self { records: VecDeque::new(), lost: 0, ended: false, level: LevelFilter::OFF }
    }
}

fn queue() -> MutexGuard<'static, Queue> {
    let process = std::process::id();
    let mut known = QUEUES.iter();
    let found = known.find(|(owner, _)| *owner.get_or_init(|| process) == process);
    unpoisoned(found.unwrap_or(&QUEUES[QUEUES.len() - 1]).1.lock())
}

/// Python's number for a level; it has no TRACE.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// Sends all events to the queue.
pub(crate) fn install() {
    // Fails if a subscriber is already installed, which is then this one.
    let _ = tracing::subscriber::set_global_default(Collector);
}

/// Starts the logging thread unless it runs, and applies the loggers' current level.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    py.import("ripieno._logging")?.getattr("start")?.call0().map(|_| ())
}

/// Returns the events logged since the last call. Waits for one, at most `timeout` seconds. None
/// when there will be no more.
#[pyfunction]
pub fn take_events(py: Python<'_>, timeout: f64) -> Option<Vec<Record>> {
    let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO);
    py.detach(|| {
        let quiet = |queue: &mut Queue| queue.records.is_empty() && !queue.ended;
        let (mut queue, _) = unpoisoned(ARRIVED.wait_timeout_while(queue(), timeout, quiet));
        if queue.records.is_empty() && queue.ended {
            // A thread that is started after this one can take events again.
            queue.ended = false;
            return None;
        }
        let mut records: Vec<Record> = queue.records.drain(..).collect();
        let lost = std::mem::take(&mut queue.lost);
        let last = records.last().map(|(created, ..)| *created);
        if let (1.., Some(created)) = (lost, last) {
            let message = format!("{lost} more events came too fast to be logged");
            records.push((created, 30, "ripieno_python", file!(), line!(), message));
        }
        Some(records)
    })
}

/// Makes take_events() return the remaining events, and then None.
#[pyfunction]
pub fn end_events() {
    queue().ended = true;
    ARRIVED.notify_all();
}

/// Drops events below this Python level at their source, at the cost of a comparison.
#[pyfunction]
pub fn set_event_level(level: u32) {
    let level = match level {
        0..=5 => LevelFilter::TRACE,
        6..=10 => LevelFilter::DEBUG,
        11..=20 => LevelFilter::INFO,
        21..=30 => LevelFilter::WARN,
        31..=40 => LevelFilter::ERROR,
        41.. => LevelFilter::OFF,
    };
    if std::mem::replace(&mut queue().level, level) != level {
        callsite::rebuild_interest_cache();
    }
}

struct Collector;

impl Subscriber for Collector {
    /// Called once for each callsite, and again when the level changes.
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= queue().level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(queue().level)
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let record = (
            now.as_secs_f64(),
            number(*metadata.level()),
            metadata.target(),
            metadata.file().unwrap_or_default(),
            metadata.line().unwrap_or_default(),
            text.message + &text.fields,
        );
        let mut queue = queue();
        if queue.records.len() < EVENTS_MAX {
            queue.records.push_back(record);
            drop(queue);
            ARRIVED.notify_all();
        } else {
            queue.lost += 1;
        }
    }

    // Spans are not enabled.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// `message field=value ...`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
