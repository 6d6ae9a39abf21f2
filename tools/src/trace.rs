//! Reads traces in the format of Mooncake: one JSON object per line and request.

use std::io::{self, BufRead, BufReader, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvme_driver::remedy;
use ripieno_stack::open_file;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::model::TRACE_BLOCK_TOKENS;
use crate::problem::Problem;
use crate::size::grouped;

/// Maximum bytes of a line: a file without line ends (a device, a binary) must not fill the memory.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Maximum bytes of a trace. All its requests are in memory, and a pipe may never end.
const BYTES_MAX: u64 = 1 << 30;
/// Path that stands for stdin.
const STDIN: &str = "-";
/// Magic numbers of compressed files, and the commands to decompress them.
const COMPRESSED: [(&[u8], &str); 3] =
    [(b"\x1f\x8b", "zcat"), (b"\x28\xb5\x2f\xfd", "zstdcat"), (b"\xfd7zXZ", "xzcat")];

/// Largest timestamp in milliseconds, about 3,000 years after 1970. Larger ones have another unit.
const TIMESTAMP_MAX: f64 = 1e14;
/// First timestamps that are seconds since 1970, from 2001 to 2286, and not milliseconds: those
/// would begin 11 to 115 days after their clock.
const EPOCH_SECONDS: RangeInclusive<Duration> =
    Duration::from_millis(1_000_000_000)..=Duration::from_millis(9_999_999_999);
/// Maximum time from the first to the last arrival.
const SPAN_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Maximum tokens of a prompt, and of an output.
const TOKENS_MAX: u64 = 1 << 24;

const FORMAT: &str = "each line must be one JSON object such as \
    {\"timestamp\": 0, \"input_length\": 700, \"output_length\": 50, \"hash_ids\": [0, 1]}";

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Arrival after the first one of the trace, whose clock may begin at any time.
    pub arrival: Duration,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens to generate.
    pub output_tokens: u64,
    /// One ID per 512 tokens of the prompt. After another prefix, an ID is another block.
    pub hash_ids: Vec<u64>,
}

/// Reads the first `limit` requests of the trace at `path`, or all. `-` is stdin.
///
/// # Errors
/// Returns a [`Problem`] if the file cannot be read or holds no request, and for the first invalid
/// line: the message names file, line and field.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Vec<Request>, Problem> {
    let unreadable = |error: io::Error| {
        let hint = remedy(&error)
            .unwrap_or("name a file that you may read, or - to read from stdin what a pipe brings");
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
    let (mut requests, mut span) = (Vec::new(), Span::default());
    let mut line = Vec::new();
    let mut number = 0;
    while limit.is_none_or(|limit| requests.len() < limit) {
        line.clear();
        let read = reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        if read.map_err(unreadable)? == 0 {
            if reader.get_ref().limit() == 0 {
                let what = format!("trace {}: it has more than 1 GiB", path.display());
                return Err(Problem::new(what, "read a part of it, with --requests"));
            }
            break;
        }
        number += 1;
        let at = Place { path: path.to_owned(), line: number };
        if line.len() as u64 == LINE_BYTES_MAX && line.last() != Some(&b'\n') {
            return Err(at.problem("the line is longer than 16 MiB"));
        }
        if !line.iter().all(u8::is_ascii_whitespace) {
            let request = request(&line, &at)?;
            span.extend(request.arrival, &at)?;
            requests.push(request);
        }
    }
    if requests.is_empty() {
        return Err(Problem::new(
            format!("trace {}: the file holds no request", path.display()),
            FORMAT,
        ));
    }
    if EPOCH_SECONDS.contains(&span.first.0) {
        let (at, line) = (path.display(), span.first.1);
        return Err(Problem::new(
            format!(
                "{at}:{line}: field `timestamp`: {} is the smallest; those look like seconds since \
                 1970, and milliseconds are expected",
                span.first.0.as_millis()
            ),
            "multiply them by 1,000; milliseconds of another clock may begin with 0",
        ));
    }
    requests.iter_mut().for_each(|request| request.arrival -= span.first.0);
    Ok(requests)
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
    fn extend(&mut self, arrival: Duration, at: &Place) -> Result<(), Problem> {
        self.first = self.first.min((arrival, at.line));
        self.last = self.last.max((arrival, at.line));
        let span = self.last.0 - self.first.0;
        if span <= SPAN_MAX {
            return Ok(());
        }
        let other = if self.first.1 == at.line { self.last.1 } else { self.first.1 };
        let (name, days) = (at.path.display(), span.as_secs() / (24 * 3600));
        Err(Problem::new(
            format!(
                "{name}:{}: field `timestamp`: it is {days} days away from that of line {other}; \
                 a trace has at most 366",
                at.line
            ),
            "timestamps are milliseconds, all by one clock; correct the wrong ones",
        ))
    }
}

/// Location in a trace.
struct Place {
    path: PathBuf,
    line: u64,
}

impl Place {
    fn problem(&self, what: &str) -> Problem {
        Problem::new(format!("{}:{}: {what}", self.path.display(), self.line), FORMAT)
    }
}

fn request(line: &[u8], at: &Place) -> Result<Request, Problem> {
    let value: Value = serde_json::from_slice(line).map_err(|error| {
        // The parser counts lines within its input, which is one line.
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or_default();
        let what = format!("not a JSON object: {text} (column {})", error.column());
        if line.contains(&b',') && !line.contains(&b'{') && line.is_ascii() {
            let hint = "a CSV says how long prompts are, and not what they share, on which hits \
                        depend: make a line of JSON of each row, with `hash_ids` of its own for \
                        each (then nothing is found), or take a workload that is like yours: \
                        ripieno sim lists them";
            return Problem::new(at.problem(&what).to_string(), hint);
        }
        at.problem(&what)
    })?;
    if !value.is_object() {
        return Err(at.problem("expected a JSON object"));
    }
    let [input_tokens, output_tokens] =
        ["input_length", "output_length"].map(|name| tokens(&value, name, at));
    let (input_tokens, output_tokens) = (input_tokens?, output_tokens?);
    let ms: f64 = field(&value, "timestamp", at)?;
    if !(0.0..=TIMESTAMP_MAX).contains(&ms) {
        return Err(at.problem(&format!(
            "field `timestamp`: expected milliseconds, from 0 to {TIMESTAMP_MAX:e}, found {ms}"
        )));
    }
    let arrival = Duration::from_secs_f64(ms / 1e3);
    let hash_ids: Vec<u64> = field(&value, "hash_ids", at)?;
    check_blocks(hash_ids.len() as u64, input_tokens, at)?;
    Ok(Request { arrival, input_tokens, output_tokens, hash_ids })
}

/// Checks that there is an ID for each block of the prompt: with blocks of another size all hits
/// would be wrong.
fn check_blocks(ids: u64, input_tokens: u64, at: &Place) -> Result<(), Problem> {
    let expected = input_tokens.div_ceil(u64::from(TRACE_BLOCK_TOKENS));
    if ids == expected {
        return Ok(());
    }
    let name = at.path.display();
    let what = format!(
        "{name}:{}: {} `hash_ids` for an `input_length` of {} tokens; expected {}, one for each \
         block of {TRACE_BLOCK_TOKENS} tokens, the last of which may be partial",
        at.line,
        grouped(ids),
        grouped(input_tokens),
        grouped(expected)
    );
    let hint = match (0..=12).map(|power| 1 << power).find(|it| input_tokens.div_ceil(*it) == ids) {
        Some(tokens) => format!(
            "blocks of {tokens} tokens? Those of Bailian's traces have 16, and their times are in \
             seconds; only traces with blocks of {TRACE_BLOCK_TOKENS} tokens and times in \
             milliseconds, such as Mooncake's, can be read"
        ),
        None => "no usual size of a block fits both numbers: one of them is wrong".to_owned(),
    };
    Err(Problem::new(what, hint))
}

fn field<T: DeserializeOwned>(value: &Value, name: &str, at: &Place) -> Result<T, Problem> {
    let Some(found) = value.get(name) else {
        let problem = at.problem(&format!("field `{name}` is missing"));
        return Err(match ["session_id", "delay"].iter().find(|name| value.get(name).is_some()) {
            Some(known) => problem.with_hint(format!(
                "it is a trace of sessions (field `{known}`), whose lines have what each turn \
                 adds; a trace of whole prompts with their times is needed"
            )),
            None => problem,
        });
    };
    let read = serde_json::from_value(found.clone());
    read.map_err(|error| at.problem(&format!("field `{name}`: {error}")))
}

fn tokens(value: &Value, name: &str, at: &Place) -> Result<u64, Problem> {
    let tokens = field(value, name, at)?;
    if tokens <= TOKENS_MAX {
        return Ok(tokens);
    }
    let most = grouped(TOKENS_MAX);
    Err(at.problem(&format!("field `{name}`: expected at most {most} tokens, found {tokens}")))
}

#[cfg(test)]
mod tests;
