//! Errors of superblocks, sets of devices and formatting.

use std::fmt;

use crate::{
    block_io::BlockError,
    error::LayoutError,
    superblock::{FORMAT_VERSION, StoreId},
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
         use the version of Ripieno that wrote it, or format the store again"
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
    /// A store cannot be made with these parameters, or in these regions.
    #[error("{0}")]
    Parameters(String),
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
    /// The devices are not those of the store, or not as they were when it was formatted. The
    /// message names one of them, the difference and the remedy.
    #[error("{0}")]
    Devices(String),
}

impl FormatError {
    pub(crate) fn too_small(device: impl fmt::Display, bytes: u64, needed: u64) -> Self {
        Self::Parameters(format!(
            "{device}: its region has {bytes} bytes, and a store needs {needed} at least"
        ))
    }
}
