//! The kernel's log, from a given time on.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A reader of /dev/kmsg.
#[derive(Debug)]
pub struct Kmsg {
    file: File,
    seen: Vec<String>,
}

impl Kmsg {
    /// Opens the log at the messages after this call.
    pub fn from_now() -> Result<Self> {
        let mut kmsg = Self::from_boot()?;
        kmsg.file.seek(SeekFrom::End(0)).context("/dev/kmsg")?;
        Ok(kmsg)
    }

    /// Opens the log at its first remaining message.
    pub fn from_boot() -> Result<Self> {
        let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
        let file = OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg");
        Ok(Self { file: file.context("/dev/kmsg")?, seen: Vec::new() })
    }

    /// Returns all messages so far.
    pub fn lines(&mut self) -> Vec<String> {
        // The kernel returns one whole record per read, and an error if it does not fit.
        let mut record = [0; 8192];
        loop {
            match self.file.read(&mut record) {
                Ok(0) => break,
                Ok(len) => {
                    let record = String::from_utf8_lossy(&record[..len]);
                    // `priority,sequence,time,flags;text`, then continuation lines.
                    let text = record.lines().next().and_then(|line| line.split_once(';'));
                    self.seen.extend(text.map(|(_, text)| text.to_owned()));
                }
                // A record was overwritten before it was read.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(_) => break,
            }
        }
        self.seen.clone()
    }

    /// Returns the first message that contains `text`; waits up to `limit`.
    pub fn wait(&mut self, text: &str, limit: Duration) -> Result<String> {
        let until = Instant::now() + limit;
        loop {
            if let Some(line) = self.lines().into_iter().find(|line| line.contains(text)) {
                return Ok(line);
            }
            if Instant::now() > until {
                bail!("the kernel did not say `{text}`; it said {:?}", self.seen);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
