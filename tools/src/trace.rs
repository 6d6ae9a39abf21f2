//! Reads traces in the format of Mooncake: one JSON object per line and request.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ripieno_stack::open_file;
use serde_json::Value;

use crate::model::TRACE_BLOCK_TOKENS;
use crate::problem::Problem;

/// Maximum bytes of a line: a file without line ends (a device, a binary) must not fill the memory.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Maximum bytes of a trace. All its requests are in memory, and a pipe may never end.
const BYTES_MAX: u64 = 1 << 30;
/// Path that stands for stdin.
const STDIN: &str = "-";
/// Magic numbers of compressed files, and the commands to decompress them.
const COMPRESSED: [(&[u8], &str); 3] =
    [(b"\x1f\x8b", "zcat"), (b"\x28\xb5\x2f\xfd", "zstdcat"), (b"\xfd7zXZ", "xzcat")];

const FORMAT: &str = "each line must be one JSON object such as \
    {\"timestamp\": 0, \"input_length\": 700, \"output_length\": 50, \"hash_ids\": [0, 1]}";

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Arrival since the trace began.
    pub(crate) arrival: Duration,
    /// Tokens of the prompt.
    pub(crate) input_tokens: u64,
    /// Tokens to generate.
    pub(crate) output_tokens: u64,
    /// One ID per 512 tokens of the prompt. After another prefix, an ID is another block.
    pub(crate) hash_ids: Vec<u64>,
}

impl Request {
    /// Returns true if the number of IDs does not follow from the prompt's length.
    pub(crate) fn is_uneven(&self) -> bool {
        self.input_tokens.div_ceil(u64::from(TRACE_BLOCK_TOKENS)) != self.hash_ids.len() as u64
    }
}

/// Reads the first `limit` requests of the trace at `path`, or all. `-` is stdin.
///
/// # Errors
/// Returns a [`Problem`] if the file cannot be read or holds no request, and for the first invalid
/// line: the message names file, line and field.
pub(crate) fn read(path: &Path, limit: Option<usize>) -> Result<Vec<Request>, Problem> {
    let unreadable = |error: io::Error| {
        let hint = "name a file that you may read, or - to read from stdin what a pipe brings";
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
    let mut requests = Vec::new();
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
            requests.push(request(&line, &at)?);
        }
    }
    if requests.is_empty() {
        return Err(Problem::new(
            format!("trace {}: the file holds no request", path.display()),
            FORMAT,
        ));
    }
    Ok(requests)
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
        at.problem(&format!("not a JSON object: {text} (column {})", error.column()))
    })?;
    if !value.is_object() {
        return Err(at.problem(&format!("expected a JSON object, found {}", kind(&value))));
    }
    let input_tokens = count(&value, "input_length", at)?;
    let output_tokens = count(&value, "output_length", at)?;
    let timestamp = field(&value, "timestamp", at)?;
    let arrival = timestamp.as_f64().map(|time| Duration::try_from_secs_f64(time / 1e3));
    let Some(Ok(arrival)) = arrival else {
        let found = kind(timestamp);
        return Err(at.problem(&format!(
            "field `timestamp`: expected milliseconds, zero or more, found {found}"
        )));
    };
    let ids = field(&value, "hash_ids", at)?;
    let Some(ids) = ids.as_array() else {
        return Err(at.problem(&format!(
            "field `hash_ids`: expected a list of block ids, found {}",
            kind(ids)
        )));
    };
    let hash_ids = ids
        .iter()
        .enumerate()
        .map(|(index, id)| whole(id, &format!("hash_ids[{index}]"), at))
        .collect::<Result<_, _>>()?;
    Ok(Request { arrival, input_tokens, output_tokens, hash_ids })
}

fn field<'a>(value: &'a Value, name: &str, at: &Place) -> Result<&'a Value, Problem> {
    value.get(name).ok_or_else(|| at.problem(&format!("field `{name}` is missing")))
}

fn count(value: &Value, name: &str, at: &Place) -> Result<u64, Problem> {
    whole(field(value, name, at)?, name, at)
}

fn whole(value: &Value, name: &str, at: &Place) -> Result<u64, Problem> {
    value.as_u64().ok_or_else(|| {
        let found = kind(value);
        at.problem(&format!("field `{name}`: expected a whole number, zero or more, found {found}"))
    })
}

/// Describes a value in words; numbers and short strings are shown.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) if number.as_i64().is_some_and(|n| n < 0) => {
            format!("the negative number {number}")
        }
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests;
