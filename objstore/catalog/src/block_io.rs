//! The medium that superblocks and journal are read from and written to.

/// One region of one device, addressed by bytes from the region's start.
///
/// Offsets and lengths are multiples of [`BlockIo::lba_bytes`]. A write without FUA may be in a
/// volatile cache when it returns: until the next flush, power loss may keep it, drop it, or keep
/// some of its LBAs.
pub trait BlockIo: Send {
    /// The device, as error messages name it.
    fn name(&self) -> &str;

    /// Its LBA size in bytes: a power of two.
    fn lba_bytes(&self) -> u32;

    /// Size of the region in bytes.
    fn bytes(&self) -> u64;

    /// Reads `into.len()` bytes.
    ///
    /// # Errors
    /// [`BlockError`]: the device did not return them; what `into` holds then means nothing.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError>;

    /// Writes `from`; with `fua` it is permanent on return (Force Unit Access).
    ///
    /// # Errors
    /// [`BlockError`]: any part of it may have been written.
    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError>;

    /// Makes everything permanent that was written before.
    ///
    /// # Errors
    /// [`BlockError`]: any unflushed write may be lost.
    fn flush(&mut self) -> Result<(), BlockError>;
}

/// What a device was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockAction {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To flush its volatile cache.
    Flush,
}

impl std::fmt::Display for BlockAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
        })
    }
}

/// A device did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {action} of {bytes} bytes at offset {offset} of the store failed: {reason}")]
pub struct BlockError {
    /// The device's name.
    pub device: String,
    /// What it was asked for.
    pub action: BlockAction,
    /// First byte, from the region's start; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub bytes: u64,
    /// What it answered.
    pub reason: String,
}

#[cfg(test)]
pub(crate) mod simulated;
