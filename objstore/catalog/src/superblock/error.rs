//! Errors of superblocks, sets of devices and formatting.

use crate::{
    block_io::BlockError,
    error::LayoutError,
    superblock::{DEVICES_MAX, FORMAT_VERSION, StoreId},
};

/// Why a copy of a superblock cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyFault {
    /// There is no superblock.
    #[error("there is none")]
    None,
    /// The CRC is wrong.
    #[error("its CRC is wrong")]
    Checksum,
    /// It has another format version.
    #[error(
        "it has version {version} of the format, and this program knows version {FORMAT_VERSION}; \
         use the version of Ripieno that wrote it"
    )]
    Version {
        /// The version.
        version: u32,
    },
    /// It uses unknown features.
    #[error(
        "it uses features that this program does not know (incompat {bits:#x}); use the version of \
         Ripieno that wrote it"
    )]
    Features {
        /// Their bits.
        bits: u64,
    },
    /// A field is impossible although the CRC is right.
    #[error("its {field} is impossible")]
    Impossible {
        /// The field.
        field: &'static str,
    },
}

/// Why a device or set of devices is not the requested store, or cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A device failed.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The layout cannot be made.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The region is too small for a store.
    #[error("{device}: its region has {bytes} bytes, and a store needs {needed} at least")]
    TooSmall {
        /// The device.
        device: String,
        /// Bytes of the region.
        bytes: u64,
        /// Bytes needed before the first object.
        needed: u64,
    },
    /// A number of devices that a superblock cannot describe.
    #[error("a rank has 1 to {DEVICES_MAX} devices, and {devices} were given")]
    Devices {
        /// Devices given.
        devices: usize,
    },
    /// The rank is not below the number of ranks.
    #[error("rank {rank} of {ranks} ranks cannot be; they count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// A file has more checksums than a Commit record can carry.
    #[error(
        "{words} checksums a file are more than the {max} that a record holds; format without \
         checksums, or with larger objects"
    )]
    Checksums {
        /// Checksums of a file.
        words: u64,
        /// Maximum checksums of a file.
        max: usize,
    },
    /// A catalog without data needs the number of files.
    #[error("a catalog without data needs the number of files of its ranks; give files_max")]
    FilesUnknown,
    /// A superblock that cannot be used.
    #[error("{device}: the superblock cannot be used: {fault}")]
    Copy {
        /// The device.
        device: String,
        /// The reason.
        fault: CopyFault,
    },
    /// The copies are of different stores.
    #[error(
        "{device}: one copy of the superblock is of store {}, the other of {}; something wrote \
         over it: format it again", stores[0], stores[1]
    )]
    TwoStores {
        /// The device.
        device: String,
        /// The two stores.
        stores: [StoreId; 2],
    },
    /// There is no store on the device.
    #[error("{device}: there is no store on it; format it first, or name the device that has one")]
    Blank {
        /// The device.
        device: String,
    },
    /// The device holds foreign data.
    #[error("{device}: it holds {what} and no store; name another device, or format this one")]
    Foreign {
        /// The device.
        device: String,
        /// Its format.
        what: &'static str,
    },
    /// Formatting was interrupted.
    #[error("{device}: formatting was interrupted; format the store again")]
    HalfFormatted {
        /// The device.
        device: String,
    },
    /// The device belongs to another store.
    #[error("{device}: it belongs to store {found}, and {wanted} was asked for ({by})")]
    OtherStore {
        /// The device.
        device: String,
        /// Its store.
        found: StoreId,
        /// The requested store.
        wanted: StoreId,
        /// Source of the request: a device, or the configuration.
        by: String,
    },
    /// The device belongs to another rank.
    #[error("{device}: it belongs to rank {found} of {ranks}, and rank {wanted} was asked for")]
    OtherRank {
        /// The device.
        device: String,
        /// Its rank.
        found: u32,
        /// The ranks of its store.
        ranks: u32,
        /// The requested rank.
        wanted: u32,
    },
    /// The same device was given under two names.
    #[error("{device} and {other} both say that they are device {position}: give each device once")]
    Twice {
        /// A device.
        device: String,
        /// The other one.
        other: String,
        /// Their index.
        position: u32,
    },
    /// A device is missing.
    #[error(
        "device {position} of the {devices} of rank {rank} is missing: {identity}; attach and name \
         it, in this place"
    )]
    Missing {
        /// Its index.
        position: u32,
        /// Devices of the rank.
        devices: usize,
        /// Their rank.
        rank: u32,
        /// Its identity.
        identity: String,
    },
    /// A device is at the wrong index.
    #[error(
        "{device}: it is device {found} of the store and was given as device {given}; the order is \
         {order}"
    )]
    Order {
        /// The device.
        device: String,
        /// Its index.
        found: u32,
        /// The index at which it was given.
        given: u32,
        /// The names in the right order.
        order: String,
    },
    /// The superblock was written on another device.
    #[error(
        "{device}: its superblock was written on another device ({written_on}), and this one is \
         {identity}; a copied device is not opened: attach the original"
    )]
    OtherDevice {
        /// The device.
        device: String,
        /// Its identity.
        identity: String,
        /// The identity recorded in the superblock.
        written_on: String,
    },
    /// The LBA size changed.
    #[error(
        "{device}: it was formatted as a store with LBAs of {formatted} bytes and has LBAs of \
         {found} now; go back to that LBA format, or format the store again"
    )]
    LbaBytes {
        /// The device.
        device: String,
        /// LBA size when it was formatted.
        formatted: u32,
        /// LBA size now.
        found: u32,
    },
    /// The device shrank.
    #[error(
        "{device}: {what} had {formatted} LBAs when the store was formatted and has {found} now; \
         give it its size back, or format the store again"
    )]
    Shrunk {
        /// The device.
        device: String,
        /// Namespace or region.
        what: &'static str,
        /// LBAs then.
        formatted: u64,
        /// LBAs now.
        found: u64,
    },
    /// The region begins at another LBA.
    #[error(
        "{device}: the store's region begins at LBA {formatted}, and LBA {found} was given; give \
         the region that was formatted"
    )]
    Moved {
        /// The device.
        device: String,
        /// The first LBA recorded.
        formatted: u64,
        /// The first LBA given.
        found: u64,
    },
    /// Devices of one store disagree.
    #[error("{device} and {other} do not agree on the store's layout; format the store again")]
    Disagree {
        /// A device.
        device: String,
        /// Another one.
        other: String,
    },
    /// The store was formatted for another model.
    #[error(
        "the store was formatted for {formatted} {field}, and {asked} were asked for; use the \
         model that it was made for, or format it again"
    )]
    Shape {
        /// The field that differs.
        field: &'static str,
        /// Its value in the store.
        formatted: u32,
        /// The requested value.
        asked: u32,
    },
}
