//! A client of QEMU's monitor: one command at a time; events are queued until `wait` asks for them.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

/// Timeout of an answer: far longer than QEMU takes, unless it hangs.
const ANSWER_MAX: Duration = Duration::from_secs(600);

/// A connection to the monitor.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    /// The beginning of a line whose rest has not arrived.
    part: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Negotiates the greeting on a new connection.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let reader = BufReader::new(stream);
        let mut qmp = Self { reader, part: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.next(Instant::now() + ANSWER_MAX)?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU's monitor greets with `{greeting}`");
        }
        qmp.execute(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(qmp)
    }

    /// Runs one command, given as QMP's JSON. Returns its result.
    pub fn execute(&mut self, command: &Value) -> Result<Value> {
        let mut line = command.to_string();
        line.push('\n');
        self.reader.get_mut().write_all(line.as_bytes()).context("QEMU's monitor is gone")?;
        let until = Instant::now() + ANSWER_MAX;
        loop {
            let mut answer = self.next(until).with_context(|| format!("no answer to {command}"))?;
            if let Some(error) = answer.get("error") {
                let text = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                return Err(anyhow!("{command}: {text}"));
            }
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            self.events.push_back(answer);
        }
    }

    /// Runs a line of the human monitor, which has commands that QMP lacks.
    pub fn monitor(&mut self, line: &str) -> Result<String> {
        let arguments = json!({ "command-line": line });
        let command = json!({ "execute": "human-monitor-command", "arguments": arguments });
        let said = self.execute(&command)?;
        Ok(said.as_str().unwrap_or_default().trim().to_owned())
    }

    /// Returns the next event of this name, including queued ones.
    pub fn wait(&mut self, name: &str, limit: Duration) -> Result<Value> {
        let until = Instant::now() + limit;
        let is_it = |event: &Value| event.get("event").and_then(Value::as_str) == Some(name);
        loop {
            if let Some(at) = self.events.iter().position(is_it)
                && let Some(event) = self.events.remove(at)
            {
                return Ok(event);
            }
            let event = self.next(until).with_context(|| format!("no event {name}"))?;
            self.events.push_back(event);
        }
    }

    fn next(&mut self, until: Instant) -> Result<Value> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("QEMU said nothing in time");
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            match self.reader.read_until(b'\n', &mut self.part) {
                Ok(0) => bail!("QEMU closed its monitor"),
                Ok(_) if self.part.ends_with(b"\n") => {
                    let line = std::mem::take(&mut self.part);
                    return serde_json::from_slice(&line).context("QEMU sent no JSON");
                }
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error).context("reading from QEMU's monitor"),
            }
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests;
