//! Placement of objects: decision 4 of the architecture (affine layout in groups), as arithmetic.
//! The I/O kernel computes the same from `gio_pool`; see kernels/include/gio/abi.h.
//!
//! With `g = f div G`, `k = f mod G`, object (f, r) is stored whole on device `(k + r) mod N`, in
//! slot `(g * rows + r) * (G / N) + k div N` of that device's data region. So
//!
//! * any one row of `N` neighbouring files is spread over all `N` devices, one object each;
//! * for one row, neighbouring files are neighbouring slots on each device, up to `G / N` of them;
//! * a group is one extent of `rows * G / N` slots per device.
//!
//! This module touches no device and allocates nothing per file.

use nvme_spec::ids::Lba;

use crate::{
    error::LayoutError,
    ids::{DeviceIndex, FileId, Row, Slot},
    shape::KvShape,
};

/// Objects per row and device in a group, by default. A command merges at most 32 objects, so a run
/// of this length is cut at most once.
const GROUP_WIDTH: u32 = 64;

/// Groups for which the default group size leaves room at least, so that a small region loses
/// little to the remainder.
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
    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lbas.saturating_mul(1 << self.lba_shift)
    }
}

/// The place of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectPlace {
    /// The device.
    pub device: DeviceIndex,
    /// The slot in its data region.
    pub slot: Slot,
}

fn uneven(group: u32, devices: u32) -> LayoutError {
    LayoutError::Impossible(format!(
        "a group of {group} files cannot be spread over {devices} devices; choose a multiple of \
         the device count, of at least one"
    ))
}

/// The parameters of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// The number of devices, N.
    pub devices: u32,
    /// The files of a group, G.
    pub group: u32,
    /// The objects of a file.
    pub rows: u32,
    /// The bytes of an object in memory.
    pub object_bytes: u32,
    /// The bytes of an object on a device: padded to the LBA size.
    pub slot_bytes: u32,
}

impl Geometry {
    /// Makes the layout of files of `shape` over `devices` devices, in groups of `group` files.
    /// Objects are padded to `lba_bytes`, the largest LBA size among the devices.
    ///
    /// # Errors
    /// Returns [`LayoutError`] if a number is zero, `group` is no multiple of `devices`,
    /// `lba_bytes` is no power of two, or an object or group is too large.
    pub fn new(
        shape: &KvShape,
        devices: u32,
        group: u32,
        lba_bytes: u32,
    ) -> Result<Self, LayoutError> {
        shape.validate()?;
        if devices == 0 || group == 0 || !group.is_multiple_of(devices) {
            return Err(uneven(group, devices));
        }
        if !lba_bytes.is_power_of_two() {
            let why = format!("an LBA size of {lba_bytes} bytes is no power of two");
            return Err(LayoutError::Impossible(why));
        }
        let slot_bytes = shape
            .object_bytes
            .checked_next_multiple_of(lba_bytes)
            .ok_or_else(|| LayoutError::shape("object_bytes", "is too large to pad"))?;
        let (rows, object_bytes) = (shape.rows(), shape.object_bytes);
        let geometry = Self { devices, group, rows, object_bytes, slot_bytes };
        let file_bytes = geometry.file_bytes();
        if file_bytes.checked_mul(u64::from(geometry.width())).is_none() {
            return Err(LayoutError::Impossible(format!(
                "a group of {group} files of {file_bytes} bytes does not fit into 64 bits on each \
                 device; choose a smaller group"
            )));
        }
        Ok(geometry)
    }

    /// Makes a layout for these regions with a suitable group size: long runs, but small enough
    /// that every region holds several groups if it can.
    ///
    /// # Errors
    /// Same as [`Geometry::new`]; also if there is no region.
    pub fn for_regions(shape: &KvShape, regions: &[Region]) -> Result<Self, LayoutError> {
        let devices = u32::try_from(regions.len()).unwrap_or(u32::MAX);
        let lba_bytes = regions.iter().map(|r| 1u32 << r.lba_shift).max().unwrap_or(1);
        let mut width = GROUP_WIDTH;
        loop {
            let group = devices.checked_mul(width).ok_or_else(|| uneven(u32::MAX, devices))?;
            let geometry = Self::new(shape, devices, group, lba_bytes)?;
            if width == 1 || geometry.groups_in(regions) >= GROUPS_WANTED {
                return Ok(geometry);
            }
            width /= 2;
        }
    }

    /// Returns the number of objects of one row that are contiguous on one device: G / N.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.group / self.devices
    }

    /// Returns the place of object (`file`, `row`).
    ///
    /// # Panics
    /// Panics if `row` is not below [`Geometry::rows`]: its slot would be in another group.
    #[must_use]
    pub fn object(&self, file: FileId, row: Row) -> ObjectPlace {
        assert!(row.0 < self.rows, "row {row} of {}", self.rows);
        let (g, k) = (u64::from(file.0 / self.group), file.0 % self.group);
        let slot = (g * u64::from(self.rows) + u64::from(row.0)) * u64::from(self.width())
            + u64::from(k / self.devices);
        let device = (u64::from(k) + u64::from(row.0)) % u64::from(self.devices);
        ObjectPlace { device: DeviceIndex(device as u32), slot: Slot(slot) }
    }

    /// Returns the object at `place`: the inverse of [`Geometry::object`]. `None` if the file
    /// number would overflow, or the device does not exist.
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

    /// Returns the bytes that one file occupies over all devices, padding included.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.slot_bytes)
    }

    /// Returns the bytes of one group's extent on each device.
    #[must_use]
    pub fn group_bytes_per_device(&self) -> u64 {
        self.file_bytes() * u64::from(self.width())
    }

    /// Returns the bytes that `files` files need on each device: whole groups.
    #[must_use]
    pub fn bytes_per_device(&self, files: u64) -> u64 {
        files.div_ceil(u64::from(self.group)).saturating_mul(self.group_bytes_per_device())
    }

    /// Returns the number of whole groups that fit into every one of the regions.
    #[must_use]
    pub fn groups_in(&self, regions: &[Region]) -> u64 {
        let extent = self.group_bytes_per_device();
        regions.iter().map(|region| region.bytes() / extent).min().unwrap_or(0)
    }

    /// Returns the files that fit into the regions, and into a total `capacity_bytes` if given.
    ///
    /// The regions are used by whole groups; the capacity counts single files, so the last group
    /// may be used in part.
    ///
    /// # Errors
    /// Returns [`LayoutError::TooSmall`] if not even one file fits.
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
        // u32::MAX is reserved: tables use it for "none".
        Ok(u32::try_from(whole.min(allowed)).unwrap_or(u32::MAX).min(u32::MAX - 1))
    }

    /// Returns the first LBA of the slot on a device with this region.
    #[must_use]
    pub fn lba(&self, region: &Region, slot: Slot) -> Lba {
        Lba(region.first.0 + slot.0 * u64::from(self.slot_bytes >> region.lba_shift))
    }
}

#[cfg(test)]
mod tests;
