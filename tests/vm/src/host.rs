//! Requests to the host over the second serial line: see xtask/src/vm/host.rs.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};

use anyhow::{Context, Result, anyhow, bail};

/// Connection to the host. It answers one request at a time.
#[derive(Debug)]
pub struct Host(BufReader<File>);

impl Host {
    /// Opens the serial line.
    pub fn open() -> Result<Self> {
        let line = OpenOptions::new().read(true).write(true).open("/dev/ttyS1");
        Ok(Self(BufReader::new(line.context("/dev/ttyS1")?)))
    }

    /// Sends a request and returns the answer.
    pub fn ask(&mut self, request: &str) -> Result<String> {
        self.0.get_mut().write_all(format!("{request}\n").as_bytes())?;
        let mut answer = String::new();
        self.0.read_line(&mut answer)?;
        let answer = answer.trim_end();
        match answer.split_once(' ').unwrap_or((answer, "")) {
            ("ok", text) => Ok(text.to_owned()),
            ("error", text) => Err(anyhow!("the host on `{request}`: {text}")),
            _ => bail!("the host answers `{request}` with `{answer}`"),
        }
    }

    /// Runs a command of QEMU's monitor. Some commands report errors only as text.
    pub fn monitor(&mut self, line: &str) -> Result<String> {
        self.ask(&format!("monitor {line}"))
    }

    /// Returns the hash of a byte range in a backing file.
    pub fn hash(&mut self, file: &str, offset: u64, bytes: usize) -> Result<String> {
        self.ask(&format!("hash {file} {offset} {bytes}"))
    }
}

/// Returns the same hash (FNV-1a, 64 bits) of local bytes.
pub fn hash(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(super::hash(b""), "cbf29ce484222325");
        assert_eq!(super::hash(b"foobar"), "85944171f73967e8");
    }
}
