//! Planning the areas on the devices of a rank, and formatting them.

use std::ops::Range;

use nvme_spec::ids::Lba;

use crate::{
    block_io::BlockIo,
    codec::Codec,
    error::LayoutError,
    ids::DeviceIndex,
    journal,
    layout::{Geometry, Region},
    record::{self, CHECKSUMS_MAX},
    shape::KvShape,
    superblock::{
        DEVICES_MAX, DataArea, DeviceIdentity, FORMAT_HEAD_BYTES, FORMAT_TAIL_BYTES, FormatError,
        GROUP_BYTES_MAX, GROUP_HEADER_BYTES, HEAD_BYTES, Half, JournalArea, State, StoreId,
        StoreLayout, Superblock,
    },
};

/// Scratch range for device self-tests: part of that head, from the region's start.
pub const SCRATCH: Range<u64> = 256 << 10..512 << 10;

/// Data begins at a multiple of this.
const DATA_ALIGNMENT: u64 = 1 << 20;

/// Lower bound of the longest journal group.
const GROUP_BYTES_MIN: u64 = 4 << 10;

/// Snapshots of a full store that fit into a half: one to begin with, one in reserve for a burst,
/// and the rest so that compactions are less frequent.
const SNAPSHOTS_A_HALF: u64 = 4;

/// Minimum number of groups in a half: an eighth of it takes two of them.
const GROUPS_A_HALF_MIN: u64 = 16;

/// Parameters for formatting a rank of a store.
#[derive(Debug, Clone)]
pub struct Plan<'a> {
    /// The store: a random id.
    pub store: StoreId,
    /// The rank.
    pub rank: u32,
    /// Ranks of the store.
    pub ranks: u32,
    /// The devices in order, each with its region for the store.
    pub devices: &'a [(DeviceIdentity, Region)],
    /// The shape of a KV block on each rank.
    pub shape: KvShape,
    /// The codec of the objects.
    pub codec: Codec,
    /// True when the first device carries the catalog's journal.
    pub catalog: bool,
    /// True when the devices hold objects.
    pub data: bool,
    /// True to keep a checksum of each object.
    pub checksums: bool,
    /// Maximum number of namespaces.
    pub namespaces_max: u32,
    /// Maximum number of files, if fewer than fit: what all ranks have room for. Required without
    /// data.
    pub files_max: Option<u32>,
    /// Bytes of objects on this rank's devices together, if fewer than fit.
    pub capacity_bytes: Option<u64>,
    /// Files of a group; derived from the capacity or the regions' size if `None`.
    pub group: Option<u32>,
}

impl Plan<'_> {
    /// Returns the superblocks of the rank's devices, in order, for [`format_devices`].
    ///
    /// # Errors
    /// Returns [`FormatError`] if the parameters are inconsistent, or the regions are too small.
    pub fn superblocks(&self) -> Result<Vec<Superblock>, FormatError> {
        let devices = self.devices.len();
        if !(1..=DEVICES_MAX).contains(&devices) {
            return Err(FormatError::Parameters(format!(
                "a rank has 1 to {DEVICES_MAX} devices, and {devices} were given"
            )));
        }
        if self.rank >= self.ranks {
            let Self { rank, ranks, .. } = self;
            return Err(FormatError::Parameters(format!(
                "rank {rank} of {ranks} ranks cannot be; they count from 0"
            )));
        }
        self.shape.validate()?;
        let words =
            if self.checksums { u64::from(self.ranks) * u64::from(self.shape.rows()) } else { 0 };
        let max = CHECKSUMS_MAX;
        if words > max as u64 {
            return Err(FormatError::Parameters(format!(
                "{words} checksums a file are more than the {max} that a record holds; format \
                 without checksums, or with larger objects"
            )));
        }
        let stored = self.stored()?;
        let (files, journal, data) = self.areas(&stored, words as u32)?;
        let layout = StoreLayout {
            shape: self.shape,
            codec: self.codec,
            files,
            words_per_file: words as u32,
            namespaces_max: self.namespaces_max,
        };
        let superblock = |(device, (_, region)): (usize, &(_, Region))| Superblock {
            sequence: 0,
            store: self.store,
            state: State::Formatting,
            rank: self.rank,
            ranks: self.ranks,
            device: DeviceIndex(device as u32),
            devices: self.devices.iter().map(|(identity, _)| identity.clone()).collect(),
            region: *region,
            layout,
            data,
            journal: journal.filter(|_| device == 0),
        };
        Ok(self.devices.iter().enumerate().map(superblock).collect())
    }

    /// Computes the number of files, the journal area and the data area.
    fn areas(
        &self,
        stored: &KvShape,
        words: u32,
    ) -> Result<(u32, Option<JournalArea>, Option<DataArea>), FormatError> {
        let cap = self.files_max.unwrap_or(u32::MAX - 1);
        let journal = |files| self.catalog.then(|| self.journal(files, words));
        if !self.data {
            let why =
                "a catalog without data needs the number of files of its ranks; give files_max";
            let files = self.files_max.ok_or_else(|| FormatError::Parameters(why.to_owned()))?;
            let journal = journal(files);
            self.room_for(end_of(journal))?;
            return Ok((files, journal, None));
        }
        self.room_for(HEAD_BYTES)?;
        let geometry = self.geometry(stored)?;
        let regions = self.regions_from(HEAD_BYTES);
        let at_most = geometry.files_in(&regions, self.capacity_bytes)?.min(cap);
        // The self-test has one file more than the catalog.
        let data = |files: u32| geometry.bytes_per_device(u64::from(files) + 1);
        let needed = |files: u32| end_of(journal(files)) + data(files);
        let room = self.devices.iter().map(|(_, region)| region.bytes()).min().unwrap_or(0);
        // More files need a longer journal: a binary search finds the most that fit beside it.
        let (mut files, mut limit) = (0, at_most);
        while files < limit {
            let middle = limit - (limit - files) / 2;
            (files, limit) =
                if needed(middle) <= room { (middle, limit) } else { (files, middle - 1) };
        }
        if files == 0 {
            let what = "the smallest device's region, for journal and data,";
            let (needed, given, unit) = (needed(1), room, "group");
            return Err(LayoutError::TooSmall { what, needed, given, unit }.into());
        }
        let journal = journal(files);
        let data = DataArea {
            offset: end_of(journal),
            bytes: data(files),
            group: geometry.group,
            slot_bytes: geometry.slot_bytes,
        };
        Ok((files, journal, Some(data)))
    }

    /// Returns the shape of a block on the devices. Refuses a codec that has no use.
    fn stored(&self) -> Result<KvShape, FormatError> {
        let (codec, raw) = (self.codec, self.shape.object_bytes);
        let Some(stored) = codec.stored(&self.shape) else {
            return Err(FormatError::Parameters(format!(
                "codec {codec} is for objects of whole multiples of {} bytes, and they have {raw}; \
                 give codec none, or another number of tokens a block",
                kv_codec::RAW_UNIT
            )));
        };
        let lba_bytes = self.lba_bytes();
        let padded = |bytes: u32| bytes.next_multiple_of(lba_bytes);
        let bytes = stored.object_bytes;
        if codec != Codec::None && self.data && padded(bytes) >= padded(raw) {
            return Err(FormatError::Parameters(format!(
                "codec {codec} saves nothing: objects of {raw} bytes have {bytes} with it, and \
                 take {} bytes either way, in LBAs of {lba_bytes}; give codec none, smaller \
                 LBAs, or more tokens a block",
                padded(raw)
            )));
        }
        Ok(stored)
    }

    /// Returns the largest LBA size of the devices.
    fn lba_bytes(&self) -> u32 {
        self.devices.iter().map(|(_, region)| 1 << region.lba_shift).max().unwrap_or(1)
    }

    fn geometry(&self, stored: &KvShape) -> Result<Geometry, FormatError> {
        let mut regions = self.regions_from(HEAD_BYTES);
        let Some(group) = self.group else {
            // The requested capacity decides, not the room beyond it: with groups too large for it,
            // the last group would be a large part of the whole.
            let asked = self.capacity_bytes.map(|bytes| bytes.div_ceil(regions.len() as u64));
            for region in &mut regions {
                let lbas = asked.map_or(u64::MAX, |bytes| (bytes >> region.lba_shift).max(1));
                region.lbas = region.lbas.min(lbas);
            }
            return Ok(Geometry::for_regions(stored, &regions)?);
        };
        Ok(Geometry::new(stored, regions.len() as u32, group, self.lba_bytes())?)
    }

    /// Returns the remaining regions from this offset on.
    fn regions_from(&self, offset: u64) -> Vec<Region> {
        let rest = |(_, region): &(_, Region)| {
            let skipped = offset >> region.lba_shift;
            let first = Lba(region.first.0.saturating_add(skipped));
            Region { first, lbas: region.lbas.saturating_sub(skipped), ..*region }
        };
        self.devices.iter().map(rest).collect()
    }

    fn room_for(&self, needed: u64) -> Result<(), FormatError> {
        for (identity, region) in self.devices {
            if region.bytes() < needed {
                return Err(FormatError::too_small(identity, region.bytes(), needed));
            }
        }
        Ok(())
    }

    /// Sizes a journal so that [`SNAPSHOTS_A_HALF`] snapshots of a full store fit into a half.
    fn journal(&self, files: u32, words: u32) -> JournalArea {
        let commit = record::commit_bytes(words as usize);
        let largest = commit.max(record::NAMESPACE_BYTES_MAX) as u64;
        let file_bytes = (commit + record::USE_BYTES) as u64;
        let raw = u64::from(files) * file_bytes
            + u64::from(self.namespaces_max) * record::NAMESPACE_BYTES_MAX as u64;
        let lba_bytes = 1 << self.devices[0].1.lba_shift;
        // A group has room for two of the largest records: it is cut between records, and would
        // otherwise be half empty.
        let least = (GROUP_HEADER_BYTES + 2 * largest).next_power_of_two();
        let least = least.max(lba_bytes).max(GROUP_BYTES_MIN);
        let group = (raw / 4).next_power_of_two().max(least).min(GROUP_BYTES_MAX);
        let snapshot = raw.div_ceil(group - GROUP_HEADER_BYTES - largest) + 1;
        let groups = (SNAPSHOTS_A_HALF * snapshot).max(GROUPS_A_HALF_MIN);
        JournalArea {
            offset: HEAD_BYTES,
            half_bytes: groups * group,
            group_bytes_max: group as u32,
            active: Half::A,
            generation: 0,
            certain_bytes: 0,
        }
    }
}

/// Returns the offset of the data.
fn end_of(journal: Option<JournalArea>) -> u64 {
    let end = journal.map_or(HEAD_BYTES, |journal| journal.offset + 2 * journal.half_bytes);
    end.next_multiple_of(DATA_ALIGNMENT)
}

/// Writes `superblocks` and the journal, one device after the other, and of the data area only the
/// last bytes. Until the last step, opening the devices fails with [`FormatError::Devices`].
///
/// # Errors
/// Returns [`FormatError::Block`]: the devices' contents are unknown, and formatting can be
/// repeated.
///
/// # Panics
/// Panics if the numbers of devices and superblocks differ.
pub fn format_devices(
    devices: &mut [&mut dyn BlockIo],
    superblocks: &mut [Superblock],
) -> Result<(), FormatError> {
    assert_eq!(devices.len(), superblocks.len(), "each device has a superblock");
    let each = devices.iter_mut().zip(&mut *superblocks);
    for (io, superblock) in each {
        erase(&mut **io)?;
        superblock.sequence = 1;
        superblock.state = State::Formatting;
        superblock.write(&mut **io)?;
    }
    for (io, superblock) in devices.iter_mut().zip(&mut *superblocks) {
        journal::create(&mut **io, superblock)?;
    }
    for (io, superblock) in devices.iter_mut().zip(&mut *superblocks) {
        superblock.sequence += 1;
        superblock.state = State::Ready;
        superblock.write(&mut **io)?;
    }
    devices.iter_mut().zip(superblocks).try_for_each(|(io, wanted)| read_back(&mut **io, wanted))
}

/// Finds devices that are the same one, and writes that went elsewhere.
fn read_back(io: &mut dyn BlockIo, wanted: &Superblock) -> Result<(), FormatError> {
    let copies = Superblock::read_copies(io)?;
    if copies.iter().all(|copy| copy.as_ref() == Ok(wanted)) {
        return Ok(());
    }
    Err(FormatError::Devices(format!(
        "{}: another superblock is on it than the one that was just written; give each device \
         once, under one address",
        io.name()
    )))
}

/// Erases the signatures of other formats and of an earlier store.
///
/// Its superblocks are gone before the rest is touched. Power that is lost between the beginning of
/// its journal and the superblocks would leave a store that is found, and damaged.
fn erase(io: &mut dyn BlockIo) -> Result<(), FormatError> {
    io.write(0, &vec![0; HEAD_BYTES as usize], false)?;
    io.flush()?;
    let head = FORMAT_HEAD_BYTES.min(io.bytes());
    io.write(HEAD_BYTES, &vec![0; (head - HEAD_BYTES) as usize], false)?;
    let tail = (io.bytes() - head).min(FORMAT_TAIL_BYTES);
    io.write(io.bytes() - tail, &vec![0; tail as usize], false)?;
    Ok(io.flush()?)
}
