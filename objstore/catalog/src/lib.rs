//! A KV store's metadata: keys, files, and the place of each object. It never touches the data.
//!
//! # Architecture
//! - [`KvShape`] and [`Geometry`]: the place of each object (affine, in groups).
//! - [`Catalog`]: references, pins, writes reported by several ranks. In `catalog/`: `index.rs`
//!   (the block of each file: entries, table of keys, checksums, namespaces, eviction order; from
//!   and to records), `write.rs` (new blocks), `drop.rs` (eviction, removal, loss), `sharing.rs`
//!   (namespaces), `log.rs` (records for the journal, and files that wait for them).
//! - [`DurableCatalog`]: a catalog with its journal, for any number of threads. `durable/writer.rs`
//!   writes groups of records, and pieces of a snapshot between them.
//! - `policy.rs`: eviction order ([`PolicyKind`]). `file_pool.rs`: free files, in runs.
//! - [`Namespace`]: separates one engine's blocks from another's.
//! - [`BlockKey`] and [`KeyChain`]: names of KV blocks by content.
//! - [`Superblock`]: a device's part of a store; [`check_set`]. `format.rs` is above superblock and
//!   journal, and makes both: [`Plan`], [`format_devices`].
//! - [`Owner`]: who has a device open that other processes reach, too; [`Fenced`] keeps the journal
//!   from writing after another one took it over.
//! - [`Journal`]: [`Record`]s in an order that survives power loss. Superblocks and journal are
//!   written to a [`BlockIo`]; docs/reference/on-disk-format.md gives their bytes.
//!
//! # Invariants
//! - The only I/O is that of the superblocks and the journal; no threads of its own, no clock, no
//!   randomness.
//! - A key is in one file at most.
//! - A file that is referenced, pinned or being written is not evicted, and one that is in use is
//!   not reused. A file that lost its key is not reused before that is durable in the journal.
//! - A block is found only after every rank has written it.
//! - Keys of one namespace, or of one epoch of it, never match another's.
//! - Reference and write ids are valid for one release, commit or abort.
//! - A journal group is valid only as a whole and in its place, and a gap never ends the journal.
//!
//! # Not implemented
//! - A second copy of the journal. From a damaged one, [`salvage_journal`] reads the records that
//!   are left, and [`rewrite_journal`] makes a new one.

mod block_io;
mod catalog;
mod codec;
mod durable;
mod error;
mod file_pool;
mod format;
mod ids;
mod journal;
mod key;
mod layout;
mod namespace;
mod owner;
mod policy;
mod record;
mod shape;
mod superblock;

pub use block_io::{BlockAction, BlockError, BlockIo};
pub use catalog::{
    Catalog, CatalogConfig, CatalogCounts, CatalogError, Group, Hit, KeyState, NamespaceOwner,
    NewPin, Outcome, PINS_MAX, PinAnswer, PinLimits, PinList, PinStatus, Position, Reference,
    ReferenceId, Reported, SnapshotCursor, StoredFile, Usage, Write, WriteBudget, WriteId,
};
pub use codec::Codec;
pub use durable::{DurableCatalog, DurableConfig, NotDurable, Seal, Time, lock};
pub use error::LayoutError;
pub use format::{Plan, SCRATCH, format_devices};
pub use ids::{BlockId, DeviceIndex, FileId, Layer, Lsn, NamespaceId, Row, Slot};
pub use journal::{
    Appended, DamageProof, Journal, JournalCounts, JournalError, JournalSalvage, JournalScan,
    RecordCounts, rewrite_journal, salvage_journal, scan_journal,
};
pub use key::{BlockKey, KeyChain};
pub use layout::{Geometry, ObjectPlace, Region};
pub use namespace::Namespace;
pub use owner::{Fenced, Owner, OwnerError, Sighting};
pub use policy::{Candidate, Policy, PolicyKind, Tiers};
pub use record::{CHECKSUMS_MAX, LABEL_BYTES_MAX, Record, RecordError, Records, UseKind, Words};
pub use shape::{KvShape, ROWS_MAX};
pub use superblock::{
    CopyFault, DEVICES_MAX, DataArea, DeviceIdentity, Expected, FORMAT_HEAD_BYTES,
    FORMAT_TAIL_BYTES, FORMAT_VERSION, Foreign, FormatError, Half, JournalArea, Member, OnDevice,
    SUPERBLOCK_BYTES, SUPERBLOCK_MAGIC, State, StoreId, StoreLayout, Superblock, check_set,
    foreign_data, foreign_signature, is_blank,
};
