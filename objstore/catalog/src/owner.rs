//! The owner of a device that several controllers reach.
//!
//! Two processes may have one namespace: of a dual-port drive, of two functions of a drive, of a
//! subsystem with two controllers. VFIO keeps a second process away from a controller only. So an
//! owner writes a *claim* when it opens the device, and a *pulse* at intervals. Another process
//! takes the device only after it saw no pulse for a while; it writes its own claim, waits, and
//! only then reads anything. An owner reads the claim again before each of its writes ([`Fenced`]):
//! one that was stopped, and comes back after another one took over, changes nothing.
//!
//! The two blocks are apart, because each has one kind of writer: a pulse that comes late replaces
//! no claim.

use std::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{
    block_io::{BlockAction, BlockError, BlockIo},
    durable::Time,
};

/// Offset of the claim, from the region's start.
const CLAIM: u64 = 768 << 10;

/// Offset of the pulse.
const PULSE: u64 = 832 << 10;

const CLAIM_MAGIC: [u8; 8] = *b"RIPOWNER";
const PULSE_MAGIC: [u8; 8] = *b"RIPPULSE";
const HOST_BYTES: usize = 64;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct ClaimBlock {
    magic: [u8; 8],
    /// CRC-32C of this block, with zeroes here.
    crc: U32,
    pid: U32,
    id: [u8; 16],
    since: U64,
    /// 0 while it is open, 1 once it was closed.
    closed: U64,
    host: [u8; HOST_BYTES],
}
const _: () = assert!(size_of::<ClaimBlock>() == 112);

#[derive(
    FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug, PartialEq,
)]
#[repr(C)]
struct PulseBlock {
    magic: [u8; 8],
    id: [u8; 16],
    count: U64,
}
const _: () = assert!(size_of::<PulseBlock>() == 32);

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owner {
    /// Random, drawn for each opening; zeroes: none was drawn.
    pub id: [u8; 16],
    /// Name of its machine, up to 64 bytes.
    pub host: String,
    /// Process id on that machine.
    pub pid: u32,
    /// Time of the opening by that machine's clock, in seconds since 1970.
    pub since: u64,
}

/// Why an owner may not write.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    /// The device failed.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The device has another owner, or was formatted.
    #[error(
        "{device}: {}; nothing that is stored here may be used any more: end this process",
        by_whom(by.as_ref())
    )]
    Lost {
        /// The device.
        device: String,
        /// The owner; `None` if the claim is gone.
        by: Option<Owner>,
    },
}

fn by_whom(by: Option<&Owner>) -> String {
    match by {
        Some(owner) => format!("another process took the store over, {owner}"),
        None => "something removed this process's claim, as formatting does".to_owned(),
    }
}

impl From<OwnerError> for BlockError {
    fn from(error: OwnerError) -> Self {
        let reason = error.to_string();
        match error {
            OwnerError::Block(error) => error,
            OwnerError::Lost { device, .. } => {
                let bytes = size_of::<ClaimBlock>() as u64;
                Self { device, action: BlockAction::Read, offset: CLAIM, bytes, reason }
            }
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, pid, since, .. } = self;
        let (year, month, day) = date(since / 86_400);
        let (hour, minute, second) = (since / 3_600 % 24, since / 60 % 60, since % 60);
        write!(
            f,
            "process {pid} on {host}, since {year:04}-{month:02}-{day:02} \
             {hour:02}:{minute:02}:{second:02} UTC"
        )
    }
}

/// Returns year, month and day of a day since 1970, in the Gregorian calendar.
fn date(mut day: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // Whole cycles of 400 years first: the number comes from a device.
    let mut year = 1970 + day / 146_097 * 400;
    day %= 146_097;
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    (year, month, day + 1)
}

impl Owner {
    /// Writes this owner's claim over any other. It is durable on return.
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device fails.
    pub fn claim(&self, io: &mut dyn BlockIo) -> Result<(), BlockError> {
        self.write(io, false)
    }

    fn write(&self, io: &mut dyn BlockIo, closed: bool) -> Result<(), BlockError> {
        let mut block = ClaimBlock {
            magic: CLAIM_MAGIC,
            crc: 0.into(),
            pid: self.pid.into(),
            id: self.id,
            since: self.since.into(),
            closed: u64::from(closed).into(),
            host: [0; HOST_BYTES],
        };
        block.host.iter_mut().zip(self.host.bytes()).for_each(|(to, from)| *to = from);
        block.crc = crc32c::crc32c(block.as_bytes()).into();
        put(io, CLAIM, block.as_bytes(), true)
    }

    /// Checks that the device has this owner's claim.
    ///
    /// # Errors
    /// Returns [`OwnerError`] if it has another one or none, or cannot be read.
    pub fn check(&self, io: &mut dyn BlockIo) -> Result<(), OwnerError> {
        let found = claimed(io)?.map(|(owner, _)| owner);
        if found.as_ref().is_some_and(|found| found.id == self.id) {
            return Ok(());
        }
        Err(OwnerError::Lost { device: io.name().to_owned(), by: found })
    }

    /// Shows that this owner is alive: `count` differs each time.
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device fails.
    pub fn pulse(&self, io: &mut dyn BlockIo, count: u64) -> Result<(), BlockError> {
        let block = PulseBlock { magic: PULSE_MAGIC, id: self.id, count: count.into() };
        put(io, PULSE, block.as_bytes(), false)
    }

    /// Marks this owner's claim as closed: the next one need not wait, and earlier ones still learn
    /// who it was.
    ///
    /// # Errors
    /// Returns [`OwnerError`] if the device has another owner by now, or fails.
    pub fn release(&self, io: &mut dyn BlockIo) -> Result<(), OwnerError> {
        self.check(io)?;
        Ok(self.write(io, true)?)
    }
}

/// Claim and pulse of a device at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct Sighting {
    /// The owner that it records and that has not closed it, dead or alive.
    pub owner: Option<Owner>,
    pulse: PulseBlock,
}

impl Sighting {
    /// Reads it. Writes nothing.
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device fails.
    pub fn take(io: &mut dyn BlockIo) -> Result<Self, BlockError> {
        let owner = claimed(io)?.filter(|(_, closed)| !closed).map(|(owner, _)| owner);
        Ok(Self { owner, pulse: get(io, PULSE)? })
    }

    /// Returns the owner if it showed between `self` and `later` that it is alive.
    #[must_use]
    pub fn living<'a>(&self, later: &'a Self) -> Option<&'a Owner> {
        later.owner.as_ref().filter(|_| self != later)
    }
}

/// Returns the owner, and whether it has closed the device.
fn claimed(io: &mut dyn BlockIo) -> Result<Option<(Owner, bool)>, BlockError> {
    let block: ClaimBlock = get(io, CLAIM)?;
    let crc = crc32c::crc32c(ClaimBlock { crc: 0.into(), ..block }.as_bytes());
    if block.magic != CLAIM_MAGIC || crc != block.crc.get() {
        return Ok(None);
    }
    let host = String::from_utf8_lossy(&block.host).trim_end_matches('\0').to_owned();
    let ClaimBlock { id, pid, since, closed, .. } = block;
    let owner = Owner { id, host, pid: pid.get(), since: since.get() };
    Ok(Some((owner, closed.get() != 0)))
}

fn get<T: FromBytes + IntoBytes>(io: &mut dyn BlockIo, offset: u64) -> Result<T, BlockError> {
    let mut bytes = vec![0; io.lba_bytes() as usize];
    io.read(offset, &mut bytes)?;
    Ok(T::read_from_prefix(&bytes).map_or_else(|_| T::new_zeroed(), |(block, _)| block))
}

fn put(io: &mut dyn BlockIo, offset: u64, block: &[u8], fua: bool) -> Result<(), BlockError> {
    let mut bytes = vec![0; io.lba_bytes() as usize];
    bytes[..block.len()].copy_from_slice(block);
    io.write(offset, &bytes, fua)
}

/// A medium that takes writes only while its owner has it: one more read of an LBA for each.
///
/// A process that takes over waits between its claim and its first read. So a write that ends
/// within that time after the check is seen by it, and one that takes longer is checked again
/// before it counts.
#[derive(Debug)]
pub struct Fenced<Io> {
    io: Io,
    owner: Owner,
    time: Time,
    /// The time that whoever takes over waits, in nanoseconds.
    settle: u64,
}

impl<Io: BlockIo> Fenced<Io> {
    /// Creates the medium of `owner`, which has claimed it.
    pub fn new(io: Io, owner: Owner, time: Time, settle: u64) -> Self {
        Self { io, owner, time, settle }
    }
}

impl<Io: BlockIo> BlockIo for Fenced<Io> {
    fn name(&self) -> &str {
        self.io.name()
    }

    fn lba_bytes(&self) -> u32 {
        self.io.lba_bytes()
    }

    fn bytes(&self) -> u64 {
        self.io.bytes()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        self.io.read(offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        let since = (self.time.0)();
        self.owner.check(&mut self.io)?;
        self.io.write(offset, from, fua)?;
        // Half of it: the clocks of two machines differ.
        if (self.time.0)().saturating_sub(since) > self.settle / 2 {
            self.owner.check(&mut self.io)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        self.io.flush()
    }
}

#[cfg(test)]
mod tests;
