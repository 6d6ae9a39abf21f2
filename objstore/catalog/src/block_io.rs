//! The medium of superblocks and journal.

/// One region of one device, addressed by bytes from the region's start.
///
/// Offsets and lengths are multiples of [`BlockIo::lba_bytes`]. A write without FUA may be in a
/// volatile cache when it returns: until the next flush, power loss may keep it, drop it, or keep
/// some of its LBAs.
pub trait BlockIo: Send {
    /// Returns the device's name, for error messages.
    fn name(&self) -> &str;

    /// Returns the LBA size in bytes: a power of two.
    fn lba_bytes(&self) -> u32;

    /// Returns the size of the region in bytes.
    fn bytes(&self) -> u64;

    /// Reads `into.len()` bytes.
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device failed; the contents of `into` are then undefined.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError>;

    /// Writes `from`; with `fua` it is durable on return (Force Unit Access).
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device failed; any part of `from` may have been written.
    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError>;

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device failed; any unflushed write may be lost.
    fn flush(&mut self) -> Result<(), BlockError>;
}

/// An operation requested of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockAction {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush of the volatile cache.
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

/// A failed operation of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {action} of {bytes} bytes at offset {offset} of the store failed: {reason}")]
pub struct BlockError {
    /// The device's name.
    pub device: String,
    /// The operation.
    pub action: BlockAction,
    /// First byte, from the region's start; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub bytes: u64,
    /// The device's answer.
    pub reason: String,
}

#[cfg(test)]
pub(crate) mod tests;
