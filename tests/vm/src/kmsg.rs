//! The kernel's log, from some moment on.

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
    /// From the messages that come after this call.
    pub fn from_now() -> Result<Self> {
        let mut kmsg = Self::from_boot()?;
        kmsg.file.seek(SeekFrom::End(0)).context("/dev/kmsg")?;
        Ok(kmsg)
    }

    /// From the first message that is still there.
    pub fn from_boot() -> Result<Self> {
        let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
        let file = OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg");
        Ok(Self { file: file.context("/dev/kmsg")?, seen: Vec::new() })
    }

    /// All messages so far.
    pub fn lines(&mut self) -> Vec<String> {
        // The kernel gives one whole record a read, and an error if it does not fit.
        let mut record = [0; 8192];
        loop {
            match self.file.read(&mut record) {
                Ok(0) => break,
                Ok(len) => {
                    let record = String::from_utf8_lossy(&record[..len]);
                    // `priority,sequence,time,flags;text`, then lines with more about it.
                    let text = record.lines().next().and_then(|line| line.split_once(';'));
                    self.seen.extend(text.map(|(_, text)| text.to_owned()));
                }
                // A record that was overwritten before we came to it.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(_) => break,
            }
        }
        self.seen.clone()
    }

    /// The first message with `text` in it; waits for it up to `limit`.
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
