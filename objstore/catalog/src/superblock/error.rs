//! Why a device or a set of devices is not the store that was asked for.

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
    /// Its CRC is wrong.
    #[error("its CRC is wrong")]
    Checksum,
    /// Another version wrote it.
    #[error(
        "it has version {version} of the format, and this program knows version {FORMAT_VERSION}; \
         use the version of Ripieno that wrote it"
    )]
    Version {
        /// Which.
        version: u32,
    },
    /// It uses features that this version does not know.
    #[error(
        "it uses features that this program does not know (incompat {bits:#x}); use the version of \
         Ripieno that wrote it"
    )]
    Features {
        /// Their bits.
        bits: u64,
    },
    /// A field is impossible, though the CRC is right.
    #[error("its {field} is impossible")]
    Impossible {
        /// The field.
        field: &'static str,
    },
}

/// A device or a set of devices is not the store that was asked for, or cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A device failed.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The layout cannot be made.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Too small for a store.
    #[error("{device}: its region has {bytes} bytes, and a store needs {needed} at least")]
    TooSmall {
        /// The device.
        device: String,
        /// Bytes there are.
        bytes: u64,
        /// Bytes needed before the first object.
        needed: u64,
    },
    /// A number of devices that a superblock cannot describe.
    #[error("a rank has 1 to {DEVICES_MAX} devices, and {devices} were given")]
    Devices {
        /// How many.
        devices: usize,
    },
    /// Ranks that cannot be.
    #[error("rank {rank} of {ranks} ranks cannot be; they count from 0")]
    Rank {
        /// Which.
        rank: u32,
        /// Of how many.
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
        /// How many may be.
        max: usize,
    },
    /// A catalog without data does not know how many files there are.
    #[error("a catalog without data has to be told how many files its ranks have; give files_max")]
    FilesUnknown,
    /// A superblock that cannot be used.
    #[error("{device}: the superblock cannot be used: {fault}")]
    Copy {
        /// The device.
        device: String,
        /// Why.
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
        /// Of which.
        stores: [StoreId; 2],
    },
    /// No store on it.
    #[error("{device}: there is no store on it; format it first, or name the device that has one")]
    Blank {
        /// The device.
        device: String,
    },
    /// Somebody else's data.
    #[error("{device}: it holds {what} and no store; name another device, or format this one")]
    Foreign {
        /// The device.
        device: String,
        /// What it holds.
        what: &'static str,
    },
    /// Formatting did not end.
    #[error("{device}: formatting was interrupted; format the store again")]
    HalfFormatted {
        /// The device.
        device: String,
    },
    /// Of another store.
    #[error("{device}: it belongs to store {found}, and {wanted} was asked for ({by})")]
    OtherStore {
        /// The device.
        device: String,
        /// Its store.
        found: StoreId,
        /// The store that was asked for.
        wanted: StoreId,
        /// What asked for it: a device, or the configuration.
        by: String,
    },
    /// Of another rank.
    #[error("{device}: it belongs to rank {found} of {ranks}, and rank {wanted} was asked for")]
    OtherRank {
        /// The device.
        device: String,
        /// Its rank.
        found: u32,
        /// The ranks of its store.
        ranks: u32,
        /// The rank that was asked for.
        wanted: u32,
    },
    /// The same device under two names.
    #[error("{device} and {other} both say that they are device {position}: give each device once")]
    Twice {
        /// A device.
        device: String,
        /// The other one.
        other: String,
        /// Their place.
        position: u32,
    },
    /// A device is not there.
    #[error(
        "device {position} of the {devices} of rank {rank} is missing: {identity}; attach and name \
         it, in this place"
    )]
    Missing {
        /// Its place.
        position: u32,
        /// How many there should be.
        devices: usize,
        /// Their rank.
        rank: u32,
        /// What it is.
        identity: String,
    },
    /// Not in its place.
    #[error(
        "{device}: it is device {found} of the store and was given as device {given}; the order is \
         {order}"
    )]
    Order {
        /// The device.
        device: String,
        /// Its place.
        found: u32,
        /// The place that it was given in.
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
        /// What it is.
        identity: String,
        /// What it should be.
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
        /// Then.
        formatted: u32,
        /// Now.
        found: u32,
    },
    /// It became smaller.
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
    /// The region begins elsewhere.
    #[error(
        "{device}: the store's region begins at LBA {formatted}, and LBA {found} was given; give \
         the region that was formatted"
    )]
    Moved {
        /// The device.
        device: String,
        /// Where it began.
        formatted: u64,
        /// Where it was said to begin.
        found: u64,
    },
    /// Devices of one store tell different things.
    #[error("{device} and {other} do not agree on the store's layout; format the store again")]
    Disagree {
        /// A device.
        device: String,
        /// Another one.
        other: String,
    },
    /// Made for another model.
    #[error(
        "the store was formatted for {formatted} {field}, and {asked} were asked for; use the \
         model that it was made for, or format it again"
    )]
    Shape {
        /// What differs.
        field: &'static str,
        /// What it was formatted for.
        formatted: u32,
        /// What was asked for.
        asked: u32,
    },
}
