//! What a KV store knows without touching its data: keys, files, where each object lives.
//!
//! # Architecture
//! - [`KvShape`] and [`Geometry`]: where each object lives (affine, in groups).
//! - [`FilePool`]: free files, in runs. [`Index`]: keys, references, order of eviction.
//! - [`BlockKey`] and [`KeyChain`]: names of KV blocks by content.
//! - [`Superblock`]: what a device says of its store; [`Plan`], [`format_devices`], [`check_set`].
//! - [`Journal`]: [`Record`]s in an order that survives power loss. Both are written to a
//!   [`BlockIo`]; their bytes are in docs/on-disk-format.md.
//!
//! # Invariants
//! - No I/O but the superblocks' and the journal's; no threads, clock or chance.
//! - A key is in one file at most.
//! - A file with a reference is neither evicted nor reused.
//! - A group of the journal counts as a whole and in its place, and a gap is never its end.
//!
//! # Not implemented
//! - Repair of a damaged journal: behind the damage an eviction may be missing, so the store is
//!   formatted again.

mod block_io;
mod catalog;
mod error;
mod file_pool;
mod ids;
mod index;
mod journal;
mod key;
mod layout;
mod namespace;
mod planted;
mod policy;
mod record;
mod shape;
mod superblock;

pub use block_io::{BlockAction, BlockError, BlockIo};
pub use catalog::{
    Catalog, CatalogConfig, CatalogCounts, CatalogError, Group, Reference, ReferenceId, Reported,
    SnapshotCursor, Usage, Write, WriteBudget, WriteId,
};
pub use error::LayoutError;
pub use file_pool::FilePool;
pub use ids::{BlockId, DeviceIndex, FileId, Layer, Lsn, NamespaceId, Row, Slot};
pub use index::{Found, Index, IndexCounts, Position};
pub use journal::{
    DamageProof, Journal, JournalCounts, JournalError, JournalScan, RecordCounts, scan_journal,
};
pub use key::{BlockKey, KeyChain};
pub use layout::{Geometry, ObjectPlace, Region};
pub use namespace::Namespace;
#[cfg(any(test, feature = "planted-bugs"))]
pub use planted::{PlantedBug, plant};
pub use policy::PolicyKind;
pub use record::{CHECKSUMS_MAX, LABEL_BYTES_MAX, Record, RecordError, Records, Words};
pub use shape::{KvShape, ROWS_MAX};
pub use superblock::{
    CopyFault, DEVICES_MAX, DataArea, DeviceIdentity, Expected, FORMAT_VERSION, FormatError, Half,
    JournalArea, Member, OnDevice, Plan, SCRATCH, SUPERBLOCK_BYTES, State, StoreId, StoreLayout,
    Superblock, check_set, foreign_signature, format_devices,
};
