//! Wire format of a group. No other file knows it.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::superblock::{GROUP_HEADER_BYTES, StoreId};

const MAGIC: [u8; 8] = *b"RIPGROUP";

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    store: [u8; 16],
    generation: U64,
    position: U64,
    payload_bytes: U32,
    /// CRC-32C of this header, with zeroes here, and the payload.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() as u64 == GROUP_HEADER_BYTES);

/// Fields common to all groups of one generation of a half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Series {
    pub store: StoreId,
    pub generation: u64,
    pub lba_bytes: u64,
}

/// A whole group.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group<'a> {
    /// Its offset by its header, from the start of its half.
    pub position: u64,
    /// Its records.
    pub payload: &'a [u8],
    /// Its length with header and padding.
    pub bytes: u64,
}

impl Series {
    /// Returns the length of a group with this payload, with header and padding.
    pub fn group_bytes(&self, payload: usize) -> u64 {
        (GROUP_HEADER_BYTES + payload as u64).next_multiple_of(self.lba_bytes)
    }

    /// Encodes the group at `position` with this payload into `out`.
    pub fn encode(&self, position: u64, payload: &[u8], out: &mut Vec<u8>) {
        let mut header = Header {
            magic: MAGIC,
            store: self.store.0,
            generation: self.generation.into(),
            position: position.into(),
            payload_bytes: (payload.len() as u32).into(),
            crc: 0.into(),
        };
        header.crc = crc(&header, payload).into();
        out.clear();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(payload);
        out.resize(self.group_bytes(payload.len()) as usize, 0);
    }

    /// Returns the whole group of this series at the start of `bytes`, if there is one.
    pub fn group_in<'a>(&self, bytes: &'a [u8]) -> Option<Group<'a>> {
        let (header, _) = Header::ref_from_prefix(bytes).ok()?;
        let (_, group) = (header.generation == self.generation)
            .then(|| whole_group(bytes, self.store, self.lba_bytes))??;
        Some(group)
    }
}

/// Returns the whole group of this store at the start of `bytes`, and its generation, if any.
pub(super) fn whole_group(
    bytes: &[u8],
    store: StoreId,
    lba_bytes: u64,
) -> Option<(u64, Group<'_>)> {
    let (header, rest) = Header::ref_from_prefix(bytes).ok()?;
    let of_store = header.magic == MAGIC && header.store == store.0;
    let payload = rest.get(..header.payload_bytes.get() as usize).filter(|_| of_store)?;
    if crc(&Header { crc: 0.into(), ..*header }, payload) != header.crc.get() {
        return None;
    }
    let generation = header.generation.get();
    let bytes = Series { store, generation, lba_bytes }.group_bytes(payload.len());
    Some((generation, Group { position: header.position.get(), payload, bytes }))
}

fn crc(header: &Header, payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(header.as_bytes()), payload)
}

#[cfg(test)]
mod tests;
