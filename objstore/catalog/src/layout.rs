//! Where each object lives: decision 4 of the architecture (affine layout in groups), as
//! arithmetic. The I/O kernel computes the same from `gio_pool`; see kernels/include/gio/abi.h.
//!
//! With `g = f div G`, `k = f mod G`, object (f, r) lives whole on device `(k + r) mod N`, in slot
//! `(g * rows + r) * (G / N) + k div N` of that device's data region. So
//!
//! * any one row of `N` neighbouring files is spread over all `N` devices, one object each;
//! * for one row, neighbouring files are neighbouring slots on each device, up to `G / N` of them;
//! * a group is one extent of `rows * G / N` slots per device.
//!
//! Nothing here touches a device, and nothing is allocated per file.

use nvme_spec::ids::Lba;

use crate::{
    error::LayoutError,
    ids::{DeviceIndex, FileId, Row, Slot},
    shape::KvShape,
};

/// Objects a group holds per row and device where nothing else was asked for. A command merges at
/// the most 32 objects, so a run of this length is cut once at the most.
const GROUP_WIDTH: u32 = 64;

/// Groups that the default group size leaves room for at least, so that a small region is not
/// wasted on the remainder.
const GROUPS_WANTED: u64 = 8;

/// The part of a device that belongs to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First LBA.
    pub first: Lba,
    /// Length in LBAs.
    pub lbas: u64,
    /// log2 of the LBA size in bytes.
    pub lba_shift: u8,
}

impl Region {
    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lbas.saturating_mul(1 << self.lba_shift)
    }
}

/// Where an object lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectPlace {
    /// The device.
    pub device: DeviceIndex,
    /// The slot in its data region.
    pub slot: Slot,
}

/// The numbers that determine where every object lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    devices: u32,
    group: u32,
    rows: u32,
    object_bytes: u32,
    slot_bytes: u32,
}

impl Geometry {
    /// The layout of files of `shape` over `devices` devices, in groups of `group` files. Objects
    /// are padded to `lba_bytes`, the largest LBA size among the devices.
    ///
    /// # Errors
    /// [`LayoutError`] when a number is zero, `group` is no multiple of `devices`, `lba_bytes` is
    /// no power of two, an object is too large to be padded, or a group too large for 64 bits.
    pub fn new(
        shape: &KvShape,
        devices: u32,
        group: u32,
        lba_bytes: u32,
    ) -> Result<Self, LayoutError> {
        shape.validate()?;
        if devices == 0 || group == 0 || !group.is_multiple_of(devices) {
            return Err(LayoutError::Group { group, devices });
        }
        if !lba_bytes.is_power_of_two() {
            return Err(LayoutError::LbaBytes { lba_bytes });
        }
        let slot_bytes = shape
            .object_bytes
            .checked_next_multiple_of(lba_bytes)
            .ok_or(LayoutError::Shape { field: "object_bytes", problem: "is too large to pad" })?;
        let (rows, object_bytes) = (shape.rows(), shape.object_bytes);
        let geometry = Self { devices, group, rows, object_bytes, slot_bytes };
        let file_bytes = geometry.file_bytes();
        match file_bytes.checked_mul(u64::from(geometry.width())) {
            Some(_) => Ok(geometry),
            None => Err(LayoutError::GroupBytes { group, file_bytes }),
        }
    }

    /// A layout for these regions with a group size that suits them: long runs, but small enough
    /// that every region holds several groups if it can.
    ///
    /// # Errors
    /// As for [`Geometry::new`]; [`LayoutError::Group`] when there is no region.
    pub fn for_regions(shape: &KvShape, regions: &[Region]) -> Result<Self, LayoutError> {
        let devices = u32::try_from(regions.len()).unwrap_or(u32::MAX);
        let lba_bytes = regions.iter().map(|r| 1u32 << r.lba_shift).max().unwrap_or(1);
        let mut width = GROUP_WIDTH;
        loop {
            let group = devices
                .checked_mul(width)
                .ok_or(LayoutError::Group { group: u32::MAX, devices })?;
            let geometry = Self::new(shape, devices, group, lba_bytes)?;
            if width == 1 || geometry.groups_in(regions) >= GROUPS_WANTED {
                return Ok(geometry);
            }
            width /= 2;
        }
    }

    /// Devices, N.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// Files of a group, G.
    #[must_use]
    pub fn group(&self) -> u32 {
        self.group
    }

    /// Objects of a file.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Bytes of an object in memory.
    #[must_use]
    pub fn object_bytes(&self) -> u32 {
        self.object_bytes
    }

    /// Bytes of an object on a device: padded to the LBA size.
    #[must_use]
    pub fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    /// Objects of one row that are contiguous on one device: G / N.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.group / self.devices
    }

    /// Where object (`file`, `row`) lives.
    ///
    /// # Panics
    /// When `row` is not below [`Geometry::rows`]: a slot of another group would come out.
    #[must_use]
    pub fn object(&self, file: FileId, row: Row) -> ObjectPlace {
        assert!(row.0 < self.rows, "row {row} of {}", self.rows);
        let (g, k) = (u64::from(file.0 / self.group), file.0 % self.group);
        let slot = (g * u64::from(self.rows) + u64::from(row.0)) * u64::from(self.width())
            + u64::from(k / self.devices);
        let device = (u64::from(k) + u64::from(row.0)) % u64::from(self.devices);
        ObjectPlace { device: DeviceIndex(device as u32), slot: Slot(slot) }
    }

    /// Which object lives at `place`: the inverse of [`Geometry::object`]. `None` where no file
    /// number is large enough, or for a device that does not exist.
    #[must_use]
    pub fn at(&self, place: ObjectPlace) -> Option<(FileId, Row)> {
        let (n, d) = (u64::from(self.devices), u64::from(place.device.0));
        if d >= n {
            return None;
        }
        let width = u64::from(self.width());
        let (line, column) = (place.slot.0 / width, place.slot.0 % width);
        let (g, r) = (line / u64::from(self.rows), line % u64::from(self.rows));
        let k = column * n + (d + n - r % n) % n;
        let file = g.checked_mul(u64::from(self.group))?.checked_add(k)?;
        Some((FileId(u32::try_from(file).ok()?), Row(r as u32)))
    }

    /// Bytes that one file occupies over all devices, padding included.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.slot_bytes)
    }

    /// Bytes of one group's extent on each device.
    #[must_use]
    pub fn group_bytes_per_device(&self) -> u64 {
        self.file_bytes() * u64::from(self.width())
    }

    /// Bytes that `files` files need on each device: whole groups.
    #[must_use]
    pub fn bytes_per_device(&self, files: u64) -> u64 {
        files.div_ceil(u64::from(self.group)).saturating_mul(self.group_bytes_per_device())
    }

    /// Bytes that `files` files need over all devices: what a workload has to provide.
    #[must_use]
    pub fn bytes_for_files(&self, files: u64) -> u64 {
        self.bytes_per_device(files).saturating_mul(u64::from(self.devices))
    }

    /// Whole groups that fit into every one of the regions.
    #[must_use]
    pub fn groups_in(&self, regions: &[Region]) -> u64 {
        let extent = self.group_bytes_per_device();
        regions.iter().map(|region| region.bytes() / extent).min().unwrap_or(0)
    }

    /// Files that fit into the regions, and into `capacity_bytes` over all devices if given.
    ///
    /// The regions are used by whole groups; the capacity counts single files, so the last group
    /// may be used in part.
    ///
    /// # Errors
    /// [`LayoutError::TooSmall`] when that is not even one file.
    pub fn files_in(
        &self,
        regions: &[Region],
        capacity_bytes: Option<u64>,
    ) -> Result<u32, LayoutError> {
        let whole = self.groups_in(regions).saturating_mul(u64::from(self.group));
        if whole == 0 {
            let given = regions.iter().map(Region::bytes).min().unwrap_or(0);
            return Err(LayoutError::TooSmall {
                what: "the smallest device's data region",
                needed: self.group_bytes_per_device(),
                given,
                unit: "group",
            });
        }
        let given = capacity_bytes.unwrap_or(u64::MAX);
        let allowed = given / self.file_bytes();
        if allowed == 0 {
            let needed = self.file_bytes();
            let what = "the configured capacity";
            return Err(LayoutError::TooSmall { what, needed, given, unit: "file" });
        }
        // u32::MAX stays free: tables use it for "none".
        Ok(u32::try_from(whole.min(allowed)).unwrap_or(u32::MAX).min(u32::MAX - 1))
    }

    /// First LBA of the slot on a device with this region.
    #[must_use]
    pub fn lba(&self, region: &Region, slot: Slot) -> Lba {
        Lba(region.first.0 + slot.0 * u64::from(self.slot_bytes >> region.lba_shift))
    }
}

#[cfg(test)]
mod tests;
