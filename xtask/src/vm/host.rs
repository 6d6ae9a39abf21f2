//! Requests of the guest to the host, over the second serial line.
//!
//! A request is one line, and so is its answer: `ok TEXT` or `error TEXT`.
//!
//! ```text
//!   qmp JSON                 a command for QEMU; the answer is what it returned
//!   monitor LINE             a line for QEMU's monitor for humans
//!   wait EVENT SECONDS       until QEMU reports this event
//!   hash FILE OFFSET BYTES   FNV-1a, 64 bits, of bytes in a file behind a device
//! ```
//!
//! With `hash`, a test learns from outside the guest where its bytes really went.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::vm::machine;
use crate::vm::qmp::Qmp;

/// Answers requests until the guest is gone.
pub fn serve(stream: UnixStream, qmp: &Mutex<Qmp>, folder: &Path) -> Result<()> {
    let mut writer = stream.try_clone().context("the line to the guest")?;
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
        let request = String::from_utf8_lossy(&line).trim().to_owned();
        line.clear();
        if request.is_empty() {
            continue;
        }
        let answer = match answer(&request, qmp, folder) {
            Ok(text) => format!("ok {text}"),
            Err(error) => format!("error {error:#}"),
        };
        let answer = answer.replace(['\r', '\n'], " ");
        if writer.write_all(format!("{answer}\n").as_bytes()).is_err() {
            break;
        }
    }
    Ok(())
}

fn answer(request: &str, qmp: &Mutex<Qmp>, folder: &Path) -> Result<String> {
    let (verb, rest) = request.split_once(' ').unwrap_or((request, ""));
    let mut qmp = qmp.lock().unwrap_or_else(PoisonError::into_inner);
    match verb {
        "qmp" => {
            let command = serde_json::from_str(rest).context("that is no JSON")?;
            Ok(qmp.execute(&command)?.to_string())
        }
        "monitor" => qmp.monitor(rest),
        "wait" => {
            let (event, seconds) = rest.split_once(' ').context("wait EVENT SECONDS")?;
            let limit = Duration::from_secs(seconds.parse().context("SECONDS")?);
            Ok(qmp.wait(event, limit)?.to_string())
        }
        "hash" => {
            let words: Vec<&str> = rest.split(' ').collect();
            let [file, offset, bytes] = words[..] else { bail!("hash FILE OFFSET BYTES") };
            let file = machine::known_file(file).context("FILE is none of this machine's")?;
            let (offset, len) =
                (offset.parse().context("OFFSET")?, bytes.parse().context("BYTES")?);
            let mut bytes = vec![0; len];
            File::open(folder.join(file))?.read_exact_at(&mut bytes, offset)?;
            Ok(format!("{:016x}", hash(&bytes)))
        }
        _ => bail!("unknown request `{verb}`"),
    }
}

/// Returns the FNV-1a hash. The guest has its own copy: one from a shared crate could be wrong on
/// both sides in the same way.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
