//! Reads the metrics of a store.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use ripieno_stack::{MetricsAddress, http};

/// Longest wait for a store that does not answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The samples of a scrape by name, without the prefix `ripieno_` and with their labels.
#[derive(Debug)]
pub(crate) struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    /// Asks a store for its metrics.
    pub(crate) fn read(address: &MetricsAddress) -> io::Result<Self> {
        let answer = http::ask(address, ("GET", "/metrics"), "", b"", TIMEOUT)?;
        let answer = String::from_utf8_lossy(&answer);
        if answer.starts_with("HTTP/1.1 401 ") {
            let why = "a server is controlled there, with a token (ripieno ctl metrics)";
            return Err(io::Error::other(why));
        }
        Self::parse(&answer).ok_or_else(|| io::Error::other("the answer is not that of a store"))
    }

    /// Parses an answer; `None` if it is not the whole answer of a store.
    pub(crate) fn parse(answer: &str) -> Option<Self> {
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let is_whole = head.starts_with("HTTP/1.1 200 ") && body.ends_with("# EOF\n");
        let samples = body.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.strip_prefix("ripieno_")?.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        let all: Option<BTreeMap<_, _>> = samples.map(sample).collect();
        all.filter(|all| is_whole && all.contains_key("healthy")).map(Self)
    }

    /// Returns a sample, or `None` if the store has no such figure.
    pub(crate) fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// Returns a sample, or 0.
    pub(crate) fn or_zero(&self, name: &str) -> f64 {
        self.get(name).unwrap_or_default()
    }

    /// Returns a sample that is a number of things, or 0.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.or_zero(name) as u64
    }

    /// Returns the number of devices.
    pub(crate) fn devices(&self) -> usize {
        self.0.keys().filter(|name| name.starts_with("device_queue_depth{")).count()
    }

    /// Returns the label of a sample with one label and this prefix: `name{label="`.
    pub(crate) fn label(&self, prefix: &str) -> Option<&str> {
        self.0.keys().find_map(|name| name.strip_prefix(prefix)?.strip_suffix("\"}"))
    }
}
