//! Wire format of a superblock. No other file knows it.

use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use nvme_spec::ids::Lba;

use super::{
    COPY_OFFSETS, CopyFault, DataArea, DeviceIdentity, FORMAT_VERSION, Half, JournalArea,
    SUPERBLOCK_BYTES, State, StoreId, StoreLayout, Superblock,
};
use crate::{
    codec::Codec,
    ids::DeviceIndex,
    layout::Region,
    record::{CHECKSUMS_MAX, NAMESPACE_BYTES_MAX, commit_bytes},
    shape::KvShape,
};

/// Bytes of a journal group before its records.
pub(crate) const GROUP_HEADER_BYTES: u64 = 48;

/// Maximum bytes of a journal group, whatever a superblock says.
pub(crate) const GROUP_BYTES_MAX: u64 = 1 << 20;

/// First bytes of a superblock.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"RIPIENO\n";
/// Feature: the objects have the codec [`Codec::Exp3`].
const EXP3: u64 = 1;
const CATALOG: u32 = 1;
const DATA: u32 = 1 << 1;
const FORMATTING: u32 = 1;
const READY: u32 = 2;

/// The part before the identities. Magic, version and CRC have the same offsets in every version.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Fixed {
    magic: [u8; 8],
    version: U32,
    /// CRC-32C of all [`SUPERBLOCK_BYTES`], with zeroes here.
    crc: U32,
    compat: U64,
    incompat: U64,
    sequence: U64,
    store: [u8; 16],
    roles: U32,
    state: U32,
    rank: U32,
    ranks: U32,
    device: U32,
    devices: U32,
    region_first: U64,
    region_lbas: U64,
    region_lba_shift: U32,
    layers: U32,
    segments: U32,
    object_bytes: U32,
    block_tokens: U32,
    files: U32,
    words_per_file: U32,
    namespaces_max: U32,
    data_offset: U64,
    data_bytes: U64,
    data_group: U32,
    data_slot_bytes: U32,
    journal_offset: U64,
    journal_half_bytes: U64,
    journal_generation: U64,
    journal_group_bytes_max: U32,
    journal_active: U32,
    journal_certain_bytes: U64,
    reserved: [u8; 64],
}
const _: () = assert!(size_of::<Fixed>() == 256);
const _: () = assert!(COPY_OFFSETS[1] >= SUPERBLOCK_BYTES as u64);

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Identity {
    model: [u8; 40],
    serial: [u8; 20],
    nsid: U32,
    nguid: [u8; 16],
    eui64: [u8; 8],
    lba_bytes: U32,
    reserved: U32,
    namespace_lbas: U64,
}
const _: () = assert!(size_of::<Identity>() == 104);

/// Maximum devices of a rank: the number that a superblock can describe.
pub const DEVICES_MAX: usize = (SUPERBLOCK_BYTES - size_of::<Fixed>()) / size_of::<Identity>();

impl Superblock {
    /// Encodes one copy, [`SUPERBLOCK_BYTES`] long.
    ///
    /// # Panics
    /// Panics if there are more devices than [`DEVICES_MAX`].
    pub(super) fn encode(&self) -> Vec<u8> {
        assert!(self.devices.len() <= DEVICES_MAX, "{} devices", self.devices.len());
        let identities: Vec<Identity> = self.devices.iter().map(identity_bytes).collect();
        let mut fixed = self.fixed();
        let bytes = |fixed: &Fixed| {
            let mut bytes = [fixed.as_bytes(), identities.as_bytes()].concat();
            bytes.resize(SUPERBLOCK_BYTES, 0);
            bytes
        };
        fixed.crc = crc32c::crc32c(&bytes(&fixed)).into();
        bytes(&fixed)
    }

    fn fixed(&self) -> Fixed {
        let KvShape { layers, segments, object_bytes, block_tokens } = self.layout.shape;
        let mut fixed = Fixed {
            magic: SUPERBLOCK_MAGIC,
            version: FORMAT_VERSION.into(),
            incompat: match self.layout.codec {
                Codec::None => 0.into(),
                Codec::Exp3 => EXP3.into(),
            },
            sequence: self.sequence.into(),
            store: self.store.0,
            state: match self.state {
                State::Formatting => FORMATTING.into(),
                State::Ready => READY.into(),
            },
            rank: self.rank.into(),
            ranks: self.ranks.into(),
            device: self.device.0.into(),
            devices: (self.devices.len() as u32).into(),
            region_first: self.region.first.0.into(),
            region_lbas: self.region.lbas.into(),
            region_lba_shift: u32::from(self.region.lba_shift).into(),
            layers: layers.into(),
            segments: segments.into(),
            object_bytes: object_bytes.into(),
            block_tokens: block_tokens.into(),
            files: self.layout.files.into(),
            words_per_file: self.layout.words_per_file.into(),
            namespaces_max: self.layout.namespaces_max.into(),
            ..Fixed::new_zeroed()
        };
        if let Some(data) = self.data {
            fixed.roles |= DATA;
            fixed.data_offset = data.offset.into();
            fixed.data_bytes = data.bytes.into();
            fixed.data_group = data.group.into();
            fixed.data_slot_bytes = data.slot_bytes.into();
        }
        if let Some(journal) = self.journal {
            fixed.roles |= CATALOG;
            fixed.journal_offset = journal.offset.into();
            fixed.journal_half_bytes = journal.half_bytes.into();
            fixed.journal_generation = journal.generation.into();
            fixed.journal_certain_bytes = journal.certain_bytes.into();
            fixed.journal_group_bytes_max = journal.group_bytes_max.into();
            fixed.journal_active = u32::from(journal.active == Half::B).into();
        }
        fixed
    }

    /// Decodes a superblock.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, CopyFault> {
        let (fixed, rest) = Fixed::ref_from_prefix(bytes).map_err(|_| CopyFault::None)?;
        if fixed.magic != SUPERBLOCK_MAGIC {
            return Err(CopyFault::None);
        }
        let crc_at = std::mem::offset_of!(Fixed, crc);
        let (before, after) = (&bytes[..crc_at], &bytes[crc_at + 4..]);
        let crc =
            [before, &[0; 4], after].iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part));
        if crc != fixed.crc.get() {
            return Err(CopyFault::Checksum);
        }
        if fixed.version != FORMAT_VERSION {
            return Err(CopyFault::Version { version: fixed.version.get() });
        }
        let codec = match fixed.incompat.get() {
            0 => Codec::None,
            EXP3 => Codec::Exp3,
            bits => return Err(CopyFault::Features { bits: bits & !EXP3 }),
        };
        let impossible = |field| CopyFault::Impossible { field };
        let devices = fixed.devices.get() as usize;
        let (identities, _) = <[Identity]>::ref_from_prefix_with_elems(rest, devices)
            .map_err(|_| impossible("number of devices"))?;
        let superblock = Self {
            sequence: fixed.sequence.get(),
            store: StoreId(fixed.store),
            state: match fixed.state.get() {
                FORMATTING => State::Formatting,
                READY => State::Ready,
                _ => return Err(impossible("state")),
            },
            rank: fixed.rank.get(),
            ranks: fixed.ranks.get(),
            device: DeviceIndex(fixed.device.get()),
            devices: identities.iter().map(identity).collect(),
            region: Region {
                first: Lba(fixed.region_first.get()),
                lbas: fixed.region_lbas.get(),
                lba_shift: u8::try_from(fixed.region_lba_shift.get()).unwrap_or(u8::MAX),
            },
            layout: StoreLayout {
                shape: KvShape {
                    layers: fixed.layers.get(),
                    segments: fixed.segments.get(),
                    object_bytes: fixed.object_bytes.get(),
                    block_tokens: fixed.block_tokens.get(),
                },
                codec,
                files: fixed.files.get(),
                words_per_file: fixed.words_per_file.get(),
                namespaces_max: fixed.namespaces_max.get(),
            },
            data: (fixed.roles & DATA != 0).then(|| fixed.data()),
            journal: (fixed.roles & CATALOG != 0).then(|| fixed.journal()).transpose()?,
        };
        if fixed.roles.get() & !(CATALOG | DATA) != 0 {
            return Err(impossible("set of roles"));
        }
        superblock.problem().map_or(Ok(superblock), |field| Err(impossible(field)))
    }

    /// Returns the field that no formatting could have produced: the rest of the code relies on the
    /// others.
    fn problem(&self) -> Option<&'static str> {
        let Self { rank, ranks, device, devices, region, layout, data, journal, .. } = self;
        let lba_bytes = 1u64.checked_shl(u32::from(region.lba_shift)).unwrap_or(0);
        let own = devices.get(device.0 as usize);
        let KvShape { layers, segments, .. } = layout.shape;
        let rows = u64::from(layers) * u64::from(segments);
        let words = u64::from(*ranks).saturating_mul(rows);
        let largest = commit_bytes(layout.words_per_file as usize).max(NAMESPACE_BYTES_MAX);
        let checks = [
            // A counter that never gets there.
            ("sequence number", self.sequence < u64::MAX / 2),
            ("LBA size", (9..=16).contains(&region.lba_shift)),
            ("region", region.first.0.checked_add(region.lbas).is_some()),
            ("device number", own.is_some_and(|own| u64::from(own.lba_bytes) == lba_bytes)),
            ("rank", rank < ranks),
            ("shape", layout.shape.validate().is_ok()),
            ("codec", layout.codec.stored(&layout.shape).is_some()),
            ("number of files", (1..u32::MAX).contains(&layout.files)),
            ("number of checksums", [0, words].contains(&layout.words_per_file.into())),
            ("number of checksums", layout.words_per_file as usize <= CHECKSUMS_MAX),
        ];
        if let Some((field, _)) = checks.iter().find(|(_, is_well)| !is_well) {
            return Some(field);
        }
        let inside = |end: Option<u64>| end.is_some_and(|end| end <= region.bytes());
        let data_is_well = |data: &DataArea| {
            inside(data.offset.checked_add(data.bytes))
                && data.offset.is_multiple_of(lba_bytes)
                && self.geometry().is_some_and(|geometry| {
                    geometry.slot_bytes == data.slot_bytes
                        && geometry.bytes_per_device(layout.files.into()) <= data.bytes
                })
        };
        let journal_is_well = |journal: &JournalArea| {
            let (half, group) = (journal.half_bytes, u64::from(journal.group_bytes_max));
            let end = half.checked_mul(2).and_then(|bytes| journal.offset.checked_add(bytes));
            let record = commit_bytes(layout.words_per_file as usize) as u64;
            inside(end)
                && (group.is_power_of_two() && group <= GROUP_BYTES_MAX)
                && (GROUP_HEADER_BYTES + largest as u64 <= group && group.is_multiple_of(lba_bytes))
                && (half.is_multiple_of(group) && half / group >= 2)
                && journal.offset.is_multiple_of(lba_bytes)
                // The tables in memory follow from the files, and there is room for their records.
                && u64::from(layout.files) <= half / record
        };
        let areas = [
            ("data area", data.as_ref().is_none_or(data_is_well)),
            ("journal", journal.as_ref().is_none_or(journal_is_well)),
        ];
        areas.iter().find(|(_, is_well)| !is_well).map(|(field, _)| *field)
    }
}

impl Fixed {
    fn data(&self) -> DataArea {
        DataArea {
            offset: self.data_offset.get(),
            bytes: self.data_bytes.get(),
            group: self.data_group.get(),
            slot_bytes: self.data_slot_bytes.get(),
        }
    }

    fn journal(&self) -> Result<JournalArea, CopyFault> {
        Ok(JournalArea {
            offset: self.journal_offset.get(),
            half_bytes: self.journal_half_bytes.get(),
            group_bytes_max: self.journal_group_bytes_max.get(),
            active: match self.journal_active.get() {
                0 => Half::A,
                1 => Half::B,
                _ => return Err(CopyFault::Impossible { field: "active half" }),
            },
            generation: self.journal_generation.get(),
            certain_bytes: self.journal_certain_bytes.get(),
        })
    }
}

fn identity_bytes(device: &DeviceIdentity) -> Identity {
    Identity {
        model: device.model,
        serial: device.serial,
        nsid: device.nsid.into(),
        nguid: device.nguid,
        eui64: device.eui64,
        lba_bytes: device.lba_bytes.into(),
        reserved: 0.into(),
        namespace_lbas: device.namespace_lbas.into(),
    }
}

fn identity(bytes: &Identity) -> DeviceIdentity {
    DeviceIdentity {
        model: bytes.model,
        serial: bytes.serial,
        nsid: bytes.nsid.get(),
        nguid: bytes.nguid,
        eui64: bytes.eui64,
        lba_bytes: bytes.lba_bytes.get(),
        namespace_lbas: bytes.namespace_lbas.get(),
    }
}
