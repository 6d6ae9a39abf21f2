//! The journal's records and their wire format. No other file knows the layout.
//!
//! A record is a head of four bytes (kind and length of the body in words of four bytes) and the
//! body, little-endian. docs/reference/on-disk-format.md has the byte map.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
};

// `Words` exposes the memory of `u32`s as little-endian words.
const _: () = assert!(cfg!(target_endian = "little"), "a big-endian host has to swap the words");

/// Maximum bytes of a namespace's label.
pub const LABEL_BYTES_MAX: usize = 64;

/// Maximum checksums in a Commit record: its length is counted in words, in 16 bits.
pub const CHECKSUMS_MAX: usize = u16::MAX as usize - size_of::<CommitBody>() / 4;

/// One change of the catalog.
///
/// Replay applies them in order, and later ones win. A snapshot is written while changes go on, so
/// a half may evict a file that it did not mention before, which changes nothing, and may contain a
/// commit twice, which is idempotent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// Registers a namespace, or changes its properties.
    Namespace {
        /// Its number in the other records.
        id: NamespaceId,
        /// Digest of its descriptor, for lookups.
        digest: [u8; 32],
        /// Its epoch.
        epoch: u64,
        /// Maximum number of files; `None` is no limit, encoded as `u32::MAX`.
        quota_files: Option<u32>,
        /// Its relative share when space is short.
        weight: u32,
        /// Name for people: up to [`LABEL_BYTES_MAX`] bytes.
        label: &'a str,
        /// The user to whom its files count, if it has one.
        owner: Option<u32>,
    },
    /// A file holds a block, on all ranks.
    Commit {
        /// The file.
        file: FileId,
        /// The namespace of the block.
        namespace: NamespaceId,
        /// The key of the block.
        key: BlockKey,
        /// CRC-32C of each object, all rows of rank 0 first; empty if the store keeps none.
        checksums: Words<'a>,
    },
    /// These files are empty.
    Evict {
        /// The first file.
        first: FileId,
        /// Number of consecutive files.
        count: u32,
    },
    /// All files of a namespace are empty.
    Clear {
        /// The namespace.
        namespace: NamespaceId,
    },
    /// A namespace has a new epoch: all of its files are empty.
    Epoch {
        /// The namespace.
        namespace: NamespaceId,
        /// The new epoch.
        epoch: u64,
    },
    /// These files were used, the last one first. Affects only the order of eviction, not the
    /// contents.
    Use {
        /// The first file.
        first: FileId,
        /// Number of consecutive files.
        count: u32,
        /// The kind of use.
        how: UseKind,
    },
}

/// The kind of use that is reported to the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseKind {
    /// It was used.
    Touched,
    /// It belongs to the prefix of blocks that were just stored.
    Refreshed,
    /// It was used again at some time: all that a snapshot knows.
    Known,
}

/// Little-endian words of a record, unaligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Words<'a>(&'a [U32]);

impl<'a> Words<'a> {
    /// Returns the number of words.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true when there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the words.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.0.iter().map(|word| word.get())
    }
}

impl<'a> From<&'a [u32]> for Words<'a> {
    fn from(words: &'a [u32]) -> Self {
        Self(<[U32]>::ref_from_bytes(words.as_bytes()).expect("four bytes each, of any alignment"))
    }
}

/// Why bytes are no record of this version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RecordError(pub(crate) String);

impl RecordError {
    fn value(kind: u16, field: &str) -> Self {
        Self(format!("a record of kind {kind} has an impossible {field}"))
    }
}

const NAMESPACE: u16 = 1;
const COMMIT: u16 = 2;
const EVICT: u16 = 3;
const CLEAR: u16 = 4;
const EPOCH: u16 = 5;
const USE: u16 = 6;

macro_rules! wire {
    ($name:ident, $bytes:literal, { $($field:ident: $type:ty),* $(,)? }) => {
        #[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        struct $name { $($field: $type),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    };
}

wire!(Head, 4, { kind: U16, words: U16 });
// The label follows, padded with zeroes to whole words, and then the owner, if there is one.
wire!(NamespaceBody, 56, {
    id: U32, quota_files: U32, weight: U32, label_bytes: U32, digest: [u8; 32], epoch: U64,
});
// The checksums follow.
wire!(CommitBody, 40, { file: U32, namespace: U32, key: [u8; 32] });
wire!(EvictBody, 8, { first: U32, count: U32 });
wire!(ClearBody, 4, { namespace: U32 });
wire!(EpochBody, 12, { namespace: U32, epoch: U64 });
wire!(UseBody, 12, { first: U32, count: U32, how: U32 });

/// Returns the bytes of a Commit with `checksums` checksums.
pub(crate) const fn commit_bytes(checksums: usize) -> usize {
    size_of::<Head>() + size_of::<CommitBody>() + 4 * checksums
}

/// Bytes of a Use.
pub(crate) const USE_BYTES: usize = size_of::<Head>() + size_of::<UseBody>();

/// Maximum bytes of a Namespace.
pub(crate) const NAMESPACE_BYTES_MAX: usize =
    size_of::<Head>() + size_of::<NamespaceBody>() + LABEL_BYTES_MAX + 4;

impl<'a> Record<'a> {
    /// Appends the encoded record: a multiple of four bytes.
    ///
    /// # Panics
    /// Panics if a label is longer than [`LABEL_BYTES_MAX`], or there are more checksums than
    /// [`CHECKSUMS_MAX`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Namespace { id, digest, epoch, quota_files, weight, label, owner } => {
                assert!(label.len() <= LABEL_BYTES_MAX, "a label of {} bytes", label.len());
                let body = NamespaceBody {
                    id: id.0.into(),
                    quota_files: quota_files.unwrap_or(u32::MAX).into(),
                    weight: weight.into(),
                    label_bytes: (label.len() as u32).into(),
                    digest,
                    epoch: epoch.into(),
                };
                let mut tail = label.as_bytes().to_vec();
                tail.resize(label.len().next_multiple_of(4), 0);
                tail.extend(owner.into_iter().flat_map(u32::to_le_bytes));
                put(out, NAMESPACE, &body, &tail);
            }
            Self::Commit { file, namespace, key, checksums } => {
                let body =
                    CommitBody { file: file.0.into(), namespace: namespace.0.into(), key: key.0 };
                put(out, COMMIT, &body, checksums.0.as_bytes());
            }
            Self::Evict { first, count } => {
                let body = EvictBody { first: first.0.into(), count: count.into() };
                put(out, EVICT, &body, &[]);
            }
            Self::Clear { namespace } => {
                put(out, CLEAR, &ClearBody { namespace: namespace.0.into() }, &[]);
            }
            Self::Epoch { namespace, epoch } => {
                let body = EpochBody { namespace: namespace.0.into(), epoch: epoch.into() };
                put(out, EPOCH, &body, &[]);
            }
            Self::Use { first, count, how } => {
                let how = match how {
                    UseKind::Touched => 0,
                    UseKind::Refreshed => 1,
                    UseKind::Known => 2,
                };
                let body =
                    UseBody { first: first.0.into(), count: count.into(), how: U32::new(how) };
                put(out, USE, &body, &[]);
            }
        }
    }

    /// Decodes the record at the start of `bytes`; also returns the bytes behind it.
    fn decode(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), RecordError> {
        let (head, body, rest) = split(bytes)?;
        let kind = head.kind.get();
        let words = head.words.get();
        let length = || RecordError(format!("a record of kind {kind} cannot have {words} words"));
        let record = match kind {
            NAMESPACE => namespace(body).ok_or_else(length)??,
            COMMIT => {
                let (fixed, words) = CommitBody::ref_from_prefix(body).map_err(|_| length())?;
                let words = <[U32]>::ref_from_bytes(words).map_err(|_| length())?;
                Self::Commit {
                    file: FileId(fixed.file.get()),
                    namespace: NamespaceId(fixed.namespace.get()),
                    key: BlockKey(fixed.key),
                    checksums: Words(words),
                }
            }
            EVICT => {
                let body = EvictBody::ref_from_bytes(body).map_err(|_| length())?;
                let (first, count) = range(kind, body.first, body.count)?;
                Self::Evict { first, count }
            }
            CLEAR => {
                let body = ClearBody::ref_from_bytes(body).map_err(|_| length())?;
                Self::Clear { namespace: NamespaceId(body.namespace.get()) }
            }
            EPOCH => {
                let body = EpochBody::ref_from_bytes(body).map_err(|_| length())?;
                Self::Epoch {
                    namespace: NamespaceId(body.namespace.get()),
                    epoch: body.epoch.get(),
                }
            }
            USE => {
                let body = UseBody::ref_from_bytes(body).map_err(|_| length())?;
                let (first, count) = range(kind, body.first, body.count)?;
                let how = match body.how.get() {
                    0 => UseKind::Touched,
                    1 => UseKind::Refreshed,
                    2 => UseKind::Known,
                    _ => return Err(RecordError::value(kind, "kind of use")),
                };
                Self::Use { first, count, how }
            }
            _ => {
                return Err(RecordError(format!(
                    "a record of kind {kind} is unknown here; use the version that wrote this store"
                )));
            }
        };
        Ok((record, rest))
    }
}

fn range(kind: u16, first: U32, count: U32) -> Result<(FileId, u32), RecordError> {
    let (first, count) = (first.get(), count.get());
    if count == 0 || first.checked_add(count).is_none() {
        return Err(RecordError::value(kind, "range of files"));
    }
    Ok((FileId(first), count))
}

fn put<B: IntoBytes + Immutable>(out: &mut Vec<u8>, kind: u16, body: &B, tail: &[u8]) {
    let words = (size_of::<B>() + tail.len()) / 4;
    let words = u16::try_from(words).expect("checksums within CHECKSUMS_MAX");
    out.extend_from_slice(Head { kind: kind.into(), words: words.into() }.as_bytes());
    out.extend_from_slice(body.as_bytes());
    out.extend_from_slice(tail);
}

/// Splits off head and body of the first record; also returns the bytes behind it.
fn split(bytes: &[u8]) -> Result<(&Head, &[u8], &[u8]), RecordError> {
    let parts = || {
        let (head, rest) = Head::ref_from_prefix(bytes).ok()?;
        let (body, rest) = rest.split_at_checked(4 * usize::from(head.words.get()))?;
        Some((head, body, rest))
    };
    let cut =
        |bytes| RecordError(format!("{bytes} bytes at the end of a group are no whole record"));
    parts().ok_or_else(|| cut(bytes.len()))
}

/// Decodes a Namespace body; `None` if its length is wrong.
fn namespace(body: &[u8]) -> Option<Result<Record<'_>, RecordError>> {
    let (fixed, tail) = NamespaceBody::ref_from_prefix(body).ok()?;
    let bytes = fixed.label_bytes.get() as usize;
    if bytes > LABEL_BYTES_MAX {
        return None;
    }
    let (padded, owner) = tail.split_at_checked(bytes.next_multiple_of(4))?;
    let owner = match owner {
        [] => None,
        owner => Some(U32::ref_from_bytes(owner).ok()?.get()),
    };
    let (label, padding) = padded.split_at(bytes);
    let (Ok(label), true) = (std::str::from_utf8(label), padding.iter().all(|byte| *byte == 0))
    else {
        return Some(Err(RecordError::value(NAMESPACE, "label")));
    };
    Some(Ok(Record::Namespace {
        id: NamespaceId(fixed.id.get()),
        digest: fixed.digest,
        epoch: fixed.epoch.get(),
        quota_files: Some(fixed.quota_files.get()).filter(|files| *files != u32::MAX),
        weight: fixed.weight.get(),
        label,
        owner,
    }))
}

/// The records of a group, in order. Iteration ends after the first error.
#[derive(Debug, Clone)]
pub struct Records<'a> {
    rest: &'a [u8],
}

impl<'a> Records<'a> {
    /// Iterates over the records in `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Returns the length of the longest prefix of whole records that fits into `bytes_max`: the
    /// part for one group.
    ///
    /// # Panics
    /// Panics if the first does not fit, or the bytes are no records.
    pub(crate) fn fitting(bytes: &[u8], bytes_max: usize) -> usize {
        let mut taken = 0;
        while taken < bytes.len() {
            let (_, _, rest) = split(&bytes[taken..]).expect("whole records");
            let end = bytes.len() - rest.len();
            if end > bytes_max {
                break;
            }
            taken = end;
        }
        assert!(taken > 0 || bytes.is_empty(), "a record is larger than {bytes_max} bytes");
        taken
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let decoded = Record::decode(self.rest);
        self.rest = decoded.as_ref().map_or(&[], |(_, rest)| rest);
        Some(decoded.map(|(record, _)| record))
    }
}

#[cfg(test)]
mod tests;
