//! Reads traces of LLM serving, in the forms in which they are published. The form is recognised
//! from the beginning of the file, and block size and unit of time follow from it.
//!
//! | form | tokens of a block | times |
//! |---|---|---|
//! | Mooncake, also aiperf's `mooncake_trace` | 512, or `block_size` | milliseconds |
//! | Bailian | 16 | seconds |
//! | aiperf's `weka_trace` | `block_size` | seconds since a conversation began |
//! | ShareGPT | 16, by the text | none |
//! | Azure's LLM inference, BurstGPT | unknown | dates; seconds |

mod csv;
mod json;

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_driver::remedy;
use ripieno_stack::open_file;

use crate::contents::mix;
use crate::model::TRACE_BLOCK_TOKENS;
use crate::problem::Problem;
use crate::size::grouped;

/// Maximum bytes of a line, and of a conversation: a file without line ends (a device, a binary)
/// must not fill the memory.
const ITEM_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes of a trace. All its requests are in memory, and a pipe may never end.
const BYTES_MAX: u64 = 1 << 30;
/// Path that stands for stdin.
const STDIN: &str = "-";
/// Magic numbers of compressed files, and the commands to decompress them.
const COMPRESSED: [(&[u8], &str); 3] =
    [(b"\x1f\x8b", "zcat"), (b"\x28\xb5\x2f\xfd", "zstdcat"), (b"\xfd7zXZ", "xzcat")];

/// Largest time in seconds, about 3,000 years after 1970. Larger ones have another unit.
const SECONDS_MAX: f64 = 1e11;
/// First timestamps that are seconds since 1970, from 2001 to 2286, and not milliseconds: those
/// would begin 11 to 115 days after their clock.
const EPOCH_SECONDS: RangeInclusive<Duration> =
    Duration::from_millis(1_000_000_000)..=Duration::from_millis(9_999_999_999);
/// Maximum time from the first to the last arrival.
const SPAN_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Maximum tokens of a prompt, and of an output.
const TOKENS_MAX: u64 = 1 << 24;
/// Requests a second that no GPU serves.
const RATE_MAX: f64 = 100.0;

const FORMAT: &str = "each line must be one JSON object such as \
    {\"timestamp\": 0, \"input_length\": 700, \"output_length\": 50, \"hash_ids\": [0, 1]}; \
    docs/start/replay.md has the other forms that can be read";

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Arrival after the first one of the trace, whose clock may begin at any time; of a later turn
    /// of a session, the earliest one.
    pub arrival: Duration,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens to generate.
    pub output_tokens: u64,
    /// Tokens of a block, which has an ID.
    pub block_tokens: u32,
    /// IDs of the first blocks, as far as they are known. After another prefix, an ID is another
    /// block.
    pub hash_ids: Arc<[u64]>,
    /// Number from which the IDs of all other blocks are made: only the turns of a session share
    /// it.
    pub own: u64,
    /// Index of the turn before in the trace, and the least time from its end to this arrival.
    pub after: Option<(usize, Duration)>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            arrival: Duration::ZERO,
            input_tokens: 0,
            output_tokens: 0,
            block_tokens: TRACE_BLOCK_TOKENS,
            hash_ids: Arc::default(),
            own: 0,
            after: None,
        }
    }
}

impl Request {
    /// Returns the number of blocks of the prompt, of which the last may be partial.
    fn blocks(&self) -> u64 {
        self.input_tokens.div_ceil(self.block_tokens.into())
    }

    /// Returns the number of blocks of `tokens` tokens that hold all blocks of the trace.
    pub fn padded(&self, tokens: u32) -> u64 {
        (self.blocks() * u64::from(self.block_tokens)).div_ceil(tokens.into())
    }

    fn ids(&self) -> impl Iterator<Item = u64> {
        let (all, each) = (self.blocks(), u64::from(self.block_tokens));
        (0..all).map(move |at| {
            let tokens = (self.input_tokens - at * each).min(each);
            match self.hash_ids.get(at as usize) {
                // In a longer list, it is that of the block when it is full.
                Some(id) if tokens == each || self.hash_ids.len() as u64 == all => *id,
                _ => mix(mix(self.own ^ tokens << 48) ^ mix(at)),
            }
        })
    }

    /// Cuts the prompt into `count` blocks of `tokens` tokens. `act` gets, for each, the IDs that
    /// it adds to those of the blocks before, and its number among the blocks that add none.
    pub fn cut(&self, tokens: u32, count: u64, mut act: impl FnMut(&[u64], u32)) {
        let (mut ids, mut taken, mut part) = (self.ids(), 0, 0);
        let mut added = Vec::new();
        for block in 1..=count {
            let needed = (block * u64::from(tokens)).div_ceil(self.block_tokens.into());
            added.clear();
            added.extend(ids.by_ref().take((needed - taken) as usize));
            part = if needed > taken { 0 } else { part + 1 };
            taken = needed;
            act(&added, part);
        }
    }
}

/// A trace.
#[derive(Debug)]
pub struct Trace {
    /// Its requests, in order of arrival.
    pub requests: Vec<Request>,
    /// Its form, if it is not Mooncake's, and what it does not say.
    pub notes: Vec<String>,
    /// False if it does not say when sessions begin: they all begin at once.
    pub has_starts: bool,
}

/// Sorts requests by arrival.
pub(crate) fn sort(requests: &mut [Request]) {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|at| requests[*at].arrival);
    let mut new = vec![0; order.len()];
    order.iter().enumerate().for_each(|(to, from)| new[*from] = to);
    for request in &mut *requests {
        request.after = request.after.map(|(before, thinks)| (new[before], thinks));
    }
    requests.sort_by_key(|request| request.arrival);
}

/// Reads the first `limit` requests of the trace at `path`, or all. `-` is stdin.
///
/// # Errors
/// Returns a [`Problem`] if the file cannot be read or holds no request, and for the first invalid
/// line: the message names file, line and field.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Trace, Problem> {
    let unreadable = |error: io::Error| {
        let hint = match remedy(&error) {
            _ if path.is_dir() => {
                "of a directory of conversations, read all: cat DIR/*.json | \
                                   ripieno ..., with - in place of its name"
            }
            Some(remedy) => remedy,
            None => "name a file that you may read, or - to read from stdin what a pipe brings",
        };
        Problem::new(format!("trace {}: cannot be read: {error}", path.display()), hint)
    };
    let is_stdin = path == Path::new(STDIN);
    let input: Box<dyn Read> = match is_stdin {
        true => Box::new(io::stdin().lock()),
        false => Box::new(open_file(path).map_err(unreadable)?),
    };
    let mut reader = BufReader::with_capacity(1 << 18, input.take(BYTES_MAX));
    let start = reader.fill_buf().map_err(unreadable)?;
    if let Some((_, tool)) = COMPRESSED.iter().find(|(mark, _)| start.starts_with(mark)) {
        let (name, file) =
            (path.display(), if is_stdin { "FILE" } else { &path.to_string_lossy() });
        let hint = format!("pipe it: {tool} {file} | ripieno ..., with - in place of its name");
        return Err(Problem::new(format!("trace {name}: it is compressed"), hint));
    }
    let name = path.display().to_string();
    let mut at = Place { name: &name, unit: "", number: 0 };
    let limit = limit.unwrap_or(usize::MAX);
    let mut found = Reading { limit, ..Reading::default() };
    let start = start.trim_ascii_start();
    let end = start.iter().position(|byte| *byte == b'\n');
    let read = match (start.first(), end.map(|end| start[..end].trim_ascii_end())) {
        (Some(b'['), _) => json::array(&mut reader, &mut found, &mut at),
        (Some(b'{'), Some(line)) if !line.ends_with(b"}") => {
            json::objects(&mut reader, &mut found, &mut at)
        }
        _ => lines(&mut reader, &mut found, &mut at),
    };
    match read {
        Err(Failed::Wrong(problem)) => Err(problem),
        Err(Failed::Unreadable(error)) if reader.get_ref().limit() > 0 => Err(unreadable(error)),
        _ if reader.get_ref().limit() == 0 && found.requests.len() < limit => {
            let what = format!("trace {name}: it has more than 1 GiB");
            Err(Problem::new(what, "read a part of it, with --requests"))
        }
        _ => found.end(&name),
    }
}

/// Reason to stop reading.
enum Failed {
    Unreadable(io::Error),
    Wrong(Problem),
}

impl From<Problem> for Failed {
    fn from(problem: Problem) -> Self {
        Self::Wrong(problem)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Reads lines of JSON or CSV.
fn lines(reader: &mut impl BufRead, found: &mut Reading, at: &mut Place<'_>) -> Result<(), Failed> {
    let mut line = Vec::new();
    while !found.is_full() {
        line.clear();
        let read = reader.by_ref().take(ITEM_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            break;
        }
        at.number += 1;
        if read == ITEM_BYTES_MAX && line.last() != Some(&b'\n') {
            return Err(at.problem("the line is longer than 64 MiB").into());
        }
        match line.trim_ascii() {
            [] => {}
            row if found.form.is_some_and(|form| form.is_csv()) => csv::row(row, found, at)?,
            head if found.form.is_none() && csv::recognise(head, found) => {}
            line => json::line(line, found, at)?,
        }
    }
    Ok(())
}

/// Forms of traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Mooncake,
    Bailian,
    Weka,
    ShareGpt,
    Azure,
    BurstGpt,
}

impl Form {
    fn is_csv(self) -> bool {
        matches!(self, Self::Azure | Self::BurstGpt)
    }

    /// Returns the unit of its times, in words and in seconds.
    fn unit(self) -> (&'static str, f64) {
        if self == Self::Mooncake { ("milliseconds", 1e-3) } else { ("seconds", 1.0) }
    }

    fn note(self, is_of_sessions: bool) -> Option<&'static str> {
        Some(match self {
            Self::Mooncake if !is_of_sessions => return None,
            Self::Mooncake => {
                "read as sessions of aiperf's mooncake_trace: a line has what its turn adds to the \
                 prompt and the answer before, unless it begins with the session's first block"
            }
            Self::Bailian => "read as a Bailian trace: blocks of 16 tokens, times in seconds",
            Self::Weka => "read as conversations of aiperf's weka_trace, with times in seconds",
            Self::ShareGpt => {
                "read as ShareGPT's conversations: 4 bytes of text count as a token, and nobody \
                 takes time to think"
            }
            Self::Azure => "read as Azure's trace of LLM inference",
            Self::BurstGpt => "read as BurstGPT's trace, with times in seconds",
        })
    }
}

/// Requests of a trace of which a part was read.
#[derive(Default)]
struct Reading {
    limit: usize,
    /// Known from the first line on.
    form: Option<Form>,
    requests: Vec<Request>,
    span: Span,
    /// Lines with a time that is not a whole number of milliseconds.
    fractions: usize,
    /// Rows that were left out: those requests failed.
    failed: usize,
    /// True if the first line has no time, or no IDs: then none has.
    lacks_times: bool,
    lacks_ids: bool,
    json: json::Sessions,
    columns: [usize; 3],
}

impl Reading {
    fn is_full(&self) -> bool {
        self.requests.len() >= self.limit
    }

    /// Adds a request, and returns its index.
    fn push(&mut self, request: Request, at: &Place<'_>) -> Result<usize, Problem> {
        let Request { arrival, input_tokens, after, .. } = request;
        let before = after.map_or(Duration::ZERO, |(before, _)| self.requests[before].arrival);
        let request = Request { arrival: arrival.max(before), ..request };
        self.span.extend(request.arrival, at)?;
        at.limit("prompt", input_tokens)?;
        self.requests.push(request);
        Ok(self.requests.len() - 1)
    }

    fn end(mut self, name: &str) -> Result<Trace, Problem> {
        let (Some(form), false) = (self.form, self.requests.is_empty()) else {
            let what = format!("trace {name}: the file holds no request");
            return Err(Problem::new(what, FORMAT));
        };
        let (first, line) = self.span.first;
        if form == Form::Mooncake && EPOCH_SECONDS.contains(&first) {
            return Err(Problem::new(
                format!(
                    "{name}:{line}: field `timestamp`: {} is the smallest; those look like seconds \
                     since 1970, and milliseconds are expected",
                    first.as_millis()
                ),
                "multiply them by 1,000; milliseconds of another clock may begin with 0",
            ));
        }
        let fast = self.fast(form);
        if let Some(what) = fast.as_ref().filter(|_| self.fractions * 2 > self.requests.len()) {
            let what = format!("trace {name}: {what}, and most have fractions of milliseconds");
            return Err(Problem::new(what, "if they are seconds, multiply them by 1,000"));
        }
        let mut notes = self.notes(form);
        notes.extend(fast);
        self.requests.iter_mut().for_each(|request| request.arrival -= first);
        sort(&mut self.requests);
        Ok(Trace { requests: self.requests, notes, has_starts: !self.lacks_times })
    }

    /// Says that more requests come than a GPU serves.
    fn fast(&self, form: Form) -> Option<String> {
        let took = (self.span.last.0 - self.span.first.0).as_secs_f64();
        let (count, unit) = (self.requests.len(), form.unit().0);
        let rate = (count - 1) as f64 / took;
        let is_fast = count >= 10 && rate > RATE_MAX && rate.is_finite() && !self.lacks_times;
        is_fast.then(|| {
            format!(
                "{} requests in {took:.2} s, if times are {unit}: {rate:.0} a second, which no GPU \
                 serves",
                grouped(count as u64)
            )
        })
    }

    fn notes(&self, form: Form) -> Vec<String> {
        let [count, failed] = [self.requests.len(), self.failed].map(|it| grouped(it as u64));
        let later = self.requests.iter().filter(|it| it.after.is_some()).count();
        let mut notes: Vec<String> = form.note(later > 0).map(str::to_owned).into_iter().collect();
        if self.lacks_ids || form.is_csv() {
            notes.push(
                "it says how long prompts are, and not what they share: all are taken for new, and \
                 nothing is found but in turns of one session; real hits are more"
                    .to_owned(),
            );
        }
        if self.failed > 0 {
            notes.push(format!("{failed} rows without tokens are left out: they failed"));
        }
        if later > 0 {
            let when = match form {
                Form::Bailian => ", or later, at its own time",
                Form::ShareGpt => "",
                _ => ", and its time to think is over",
            };
            notes.push(format!(
                "{} of {count} requests are later turns of a session: each comes when the one \
                 before has ended{when}",
                grouped(later as u64)
            ));
        }
        if self.lacks_times {
            notes.push("it does not say when its sessions begin: all at once".to_owned());
        }
        notes
    }
}

/// First and last arrival by the trace's clock, with their lines.
#[derive(Debug)]
struct Span {
    first: (Duration, u64),
    last: (Duration, u64),
}

impl Default for Span {
    fn default() -> Self {
        Self { first: (Duration::MAX, 0), last: (Duration::ZERO, 0) }
    }
}

impl Span {
    /// Includes an arrival. Memory and time of a simulation must not follow from a wrong time.
    fn extend(&mut self, arrival: Duration, at: &Place<'_>) -> Result<(), Problem> {
        self.first = self.first.min((arrival, at.number));
        self.last = self.last.max((arrival, at.number));
        let span = self.last.0 - self.first.0;
        if span <= SPAN_MAX {
            return Ok(());
        }
        let other = if self.first.1 == at.number { self.last.1 } else { self.first.1 };
        let days = span.as_secs() / (24 * 3600);
        Err(Problem::new(
            format!(
                "{at}: field `timestamp`: it is {days} days away from that of line {other}; a \
                 trace has at most 366"
            ),
            "timestamps are all by one clock, Mooncake's in milliseconds; correct the wrong ones",
        ))
    }
}

/// Location in a trace.
struct Place<'a> {
    name: &'a str,
    /// Empty for lines.
    unit: &'static str,
    number: u64,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}{}", self.name, self.unit, self.number)
    }
}

impl Place<'_> {
    fn problem(&self, what: &str) -> Problem {
        Problem::new(format!("{self}: {what}"), FORMAT)
    }

    /// Rejects more tokens than a prompt or an answer may have.
    fn limit(&self, what: &str, tokens: u64) -> Result<u64, Problem> {
        if tokens <= TOKENS_MAX {
            return Ok(tokens);
        }
        let most = grouped(TOKENS_MAX);
        Err(self.problem(&format!("{what}: expected at most {most} tokens, found {tokens}")))
    }

    /// Rejects a size of a block that nobody has.
    fn block(&self, tokens: u32) -> Result<(), Problem> {
        let what = || format!("field `block_size`: expected 1 to 65536 tokens, found {tokens}");
        if (1..=1 << 16).contains(&tokens) { Ok(()) } else { Err(self.problem(&what())) }
    }

    /// Converts a time of a trace of this form.
    fn time(&self, name: &str, time: f64, form: Form) -> Result<Duration, Problem> {
        let (unit, seconds) = form.unit();
        let most = SECONDS_MAX / seconds;
        if (0.0..=most).contains(&time) {
            return Ok(Duration::from_secs_f64(time * seconds));
        }
        Err(self
            .problem(&format!("field `{name}`: expected {unit}, from 0 to {most:e}, found {time}")))
    }
}

#[cfg(test)]
mod tests;
