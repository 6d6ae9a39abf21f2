//! Errors of layouts.

/// Why a layout cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field of the shape is impossible.
    #[error("the KV shape's {field} {problem}; give the model's own numbers")]
    Shape {
        /// The field.
        field: &'static str,
        /// The problem.
        problem: &'static str,
    },
    /// The group size must be a multiple of the device count.
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
    /// A group is larger than any device.
    #[error(
        "a group of {group} files of {file_bytes} bytes does not fit into 64 bits on each device; \
         choose a smaller group"
    )]
    GroupBytes {
        /// Files of a group.
        group: u32,
        /// Bytes of a file.
        file_bytes: u64,
    },
    /// The LBA size is no power of two.
    #[error("an LBA size of {lba_bytes} bytes is no power of two")]
    LbaBytes {
        /// Bytes.
        lba_bytes: u32,
    },
    /// Not even one file or group fits.
    #[error("{what} has {given} bytes, but one {unit} of this model needs {needed} bytes")]
    TooSmall {
        /// The thing that is too small.
        what: &'static str,
        /// Bytes one unit needs.
        needed: u64,
        /// Bytes given.
        given: u64,
        /// The unit that does not fit: a file, or a group of files.
        unit: &'static str,
    },
}
