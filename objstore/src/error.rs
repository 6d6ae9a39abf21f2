//! What can go wrong.

use nvme_driver::DmaError;

/// A layout cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field of the shape is impossible.
    #[error("the KV shape's {field} {problem}; give the model's own numbers")]
    Shape {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Groups have to be a multiple of the devices.
    #[error(
        "a group of {group} files cannot be spread over {devices} devices; choose a multiple of \
         the device count, of at least one"
    )]
    Group {
        /// Files of a group.
        group: u32,
        /// Devices.
        devices: u32,
    },
    /// The LBA size is not one.
    #[error("an LBA size of {lba_bytes} bytes is no power of two")]
    LbaBytes {
        /// Bytes.
        lba_bytes: u32,
    },
    /// Not even one unit fits.
    #[error("{what} has {given} bytes, but one {unit} of this model needs {needed} bytes")]
    TooSmall {
        /// What is too small.
        what: &'static str,
        /// Bytes one unit needs.
        needed: u64,
        /// Bytes there are.
        given: u64,
        /// What does not fit: a file, or a group of files.
        unit: &'static str,
    },
}

/// The engine's memory cannot be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The number of rows is not the shape's.
    #[error("{given} row offsets were given, the shape has {shape} rows (layers * segments)")]
    Rows {
        /// Offsets given.
        given: usize,
        /// Rows of the shape.
        shape: u32,
    },
    /// Blocks and stride make no sense.
    #[error(
        "{blocks} blocks of {object}-byte objects, {block_stride} bytes apart: at least one block \
         is needed, and the stride has to be at least the object's size and within 64 bits"
    )]
    Stride {
        /// Blocks.
        blocks: u32,
        /// Bytes between objects.
        block_stride: u64,
        /// Bytes of an object.
        object: u64,
    },
    /// A row is not where it is said to be, or the device sees it in pieces.
    #[error(
        "row {row}, {length} bytes at offset {offset}, cannot be registered: {source}; each row's \
         tensor has to be one contiguous range for the device"
    )]
    Row {
        /// The row.
        row: usize,
        /// Its offset in the memory.
        offset: usize,
        /// Bytes from its first to its last object.
        length: usize,
        /// Why.
        source: DmaError,
    },
    /// Objects of two rows share bytes.
    #[error("objects of rows {first} and {second} overlap; check the offsets and the stride")]
    Overlap {
        /// One row.
        first: usize,
        /// The other one.
        second: usize,
    },
}
