//! Client of the qtest protocol: a line of text for each access, a line back.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};

/// Timeout for QEMU to open its socket, and to answer one access.
const TIMEOUT: Duration = Duration::from_secs(600);
/// The ports of PCI configuration mechanism #1.
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;

/// Connection to a machine with a stopped CPU, whose bus this process accesses.
#[derive(Debug)]
pub struct Client {
    reader: BufReader<UnixStream>,
    line: String,
}

impl Client {
    /// Connects to the socket at `path`, which QEMU may not have created yet.
    pub fn connect(path: &Path) -> anyhow::Result<Self> {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() > TIMEOUT => {
                    return Err(error).with_context(|| format!("{}", path.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self { reader: BufReader::new(stream), line: String::new() })
    }

    /// Sends `command` and returns the answer's words after "OK".
    fn ask(&mut self, command: &str) -> anyhow::Result<&str> {
        self.reader.get_mut().write_all(format!("{command}\n").as_bytes())?;
        loop {
            self.line.clear();
            if self.reader.read_line(&mut self.line)? == 0 {
                bail!("QEMU closed the connection at {command:?}");
            }
            // QEMU sends lines about interrupts at any time.
            if !self.line.starts_with("IRQ") {
                break;
            }
        }
        let answer = self.line.trim_end().strip_prefix("OK");
        answer.map(str::trim_start).ok_or_else(|| anyhow!("{command:?}: {}", self.line.trim_end()))
    }

    fn ask_number(&mut self, command: &str) -> anyhow::Result<u64> {
        let answer = self.ask(command)?;
        let digits = answer.strip_prefix("0x").unwrap_or(answer);
        u64::from_str_radix(digits, 16).with_context(|| format!("{command:?}: {answer:?}"))
    }

    /// Reads a dword of memory or of a memory-mapped register.
    pub fn readl(&mut self, address: u64) -> anyhow::Result<u32> {
        Ok(u32::try_from(self.ask_number(&format!("readl {address:#x}"))?)?)
    }

    /// Writes a dword of memory or of a memory-mapped register.
    pub fn writel(&mut self, address: u64, value: u32) -> anyhow::Result<()> {
        self.ask(&format!("writel {address:#x} {value:#x}")).map(drop)
    }

    /// Reads a dword of the configuration space of function 0 of `device` on bus 0.
    pub fn config_read(&mut self, device: u8, offset: u8) -> anyhow::Result<u32> {
        self.select(device, offset)?;
        Ok(u32::try_from(self.ask_number(&format!("inl {CONFIG_DATA:#x}"))?)?)
    }

    /// Writes a dword of the configuration space of function 0 of `device` on bus 0.
    pub fn config_write(&mut self, device: u8, offset: u8, value: u32) -> anyhow::Result<()> {
        self.select(device, offset)?;
        self.ask(&format!("outl {CONFIG_DATA:#x} {value:#x}")).map(drop)
    }

    fn select(&mut self, device: u8, offset: u8) -> anyhow::Result<()> {
        let address = 1 << 31 | u32::from(device) << 11 | u32::from(offset & !3);
        self.ask(&format!("outl {CONFIG_ADDRESS:#x} {address:#x}")).map(drop)
    }
}
