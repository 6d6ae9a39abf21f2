//! What a KV store knows without touching its data: keys, files, where each object lives.
//!
//! # Architecture
//! - [`KvShape`] and [`Geometry`]: where each object lives (affine, in groups).
//! - [`Catalog`]: which key is in which file, references, pins, writes that several ranks report
//!   on, namespaces. In `catalog/`: `table.rs` (from key to file), `write.rs` (new blocks),
//!   `drop.rs` (ways a block leaves), `log.rs` (records for the journal, and files that wait for
//!   them), `recovery.rs` and `snapshot.rs` (from and to records).
//! - `policy.rs`: what is evicted next ([`PolicyKind`]). `file_pool.rs`: free files, in runs.
//! - [`Namespace`]: what separates one engine's blocks from another's.
//! - [`BlockKey`] and [`KeyChain`]: names of KV blocks by content.
//! - [`Superblock`]: what a device says of its store; [`Plan`], [`format_devices`], [`check_set`].
//! - [`Journal`]: [`Record`]s in an order that survives power loss. Both are written to a
//!   [`BlockIo`]; their bytes are in docs/on-disk-format.md.
//!
//! # Invariants
//! - No I/O but the superblocks' and the journal's; no threads, clock or chance.
//! - A key is in one file at most.
//! - A file that is referenced, pinned or being written is not evicted, and one that is in use is
//!   not reused. A file that lost its key is not reused before the journal says so.
//! - A block is found only after every rank has written it.
//! - Keys of one namespace, or of one epoch of it, never match another's.
//! - Reference and write ids are good for one release, commit or abort.
//! - A group of the journal counts as a whole and in its place, and a gap is never its end.
//!
//! # Not implemented
//! - A second copy of the journal. Of one that is damaged, [`salvage_journal`] reads what is left,
//!   and [`rewrite_journal`] makes a new one.

mod block_io;
mod catalog;
mod error;
mod file_pool;
mod ids;
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
    Catalog, CatalogConfig, CatalogCounts, CatalogError, Found, Group, Position, Reference,
    ReferenceId, Reported, SnapshotCursor, StoredFile, Usage, Write, WriteBudget, WriteId,
};
pub use error::LayoutError;
pub use ids::{BlockId, DeviceIndex, FileId, Layer, Lsn, NamespaceId, Row, Slot};
pub use journal::{
    Appended, DamageProof, Journal, JournalCounts, JournalError, JournalSalvage, JournalScan,
    RecordCounts, rewrite_journal, salvage_journal, scan_journal,
};
pub use key::{BlockKey, KeyChain};
pub use layout::{Geometry, ObjectPlace, Region};
pub use namespace::Namespace;
#[cfg(any(test, feature = "planted-bugs"))]
pub use planted::plant;
pub use planted::{PlantedBug, planted};
pub use policy::{Candidate, Policy, PolicyKind, Tiers};
pub use record::{CHECKSUMS_MAX, LABEL_BYTES_MAX, Record, RecordError, Records, UseKind, Words};
pub use shape::{KvShape, ROWS_MAX};
pub use superblock::{
    CopyFault, DEVICES_MAX, DataArea, DeviceIdentity, Expected, FORMAT_VERSION, FormatError, Half,
    JournalArea, Member, OnDevice, Plan, SCRATCH, SUPERBLOCK_BYTES, State, StoreId, StoreLayout,
    Superblock, check_set, foreign_signature, format_devices,
};
