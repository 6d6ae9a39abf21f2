//! Namespaces, and the reasons for which one is unusable.

use nvme_spec::{
    identify::{CommandSet, IdentifyNamespace, LbaFormat},
    ids::{Lba, Nsid},
    status::Status,
};

/// A usable namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Namespace identifier.
    pub nsid: Nsid,
    /// Size in LBAs.
    pub lbas: u64,
    /// log2 of the LBA size in bytes, 9 to 16.
    pub lba_shift: u8,
    /// Index of the LBA format in use.
    pub format: u8,
    /// LBA formats the namespace can be formatted with.
    pub formats: Vec<LbaFormat>,
    /// Set if a deallocated block reads as zeroes (DLFEAT).
    pub deallocated_reads_zero: bool,
    /// I/O that crosses a multiple of this many LBAs may be slower (NOIOB); 0 = not reported.
    pub boundary_lbas: u16,
    /// Preferred length of deallocations, in LBAs (NPDG); 1 = not reported.
    pub deallocate_granularity_lbas: u32,
    /// Preferred alignment of deallocations, in LBAs (NPDA); 1 = not reported.
    pub deallocate_alignment_lbas: u32,
    /// Globally unique identifier; zeroes when there is none.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier; zeroes when there is none.
    pub eui64: [u8; 8],
    /// Set if several controllers may have it attached (NMIC).
    pub may_be_shared: bool,
    /// Set if it is write protected now (NSATTR): writes fail.
    pub is_write_protected: bool,
    /// Endurance group; 0 = not reported.
    pub endurance_group: u16,
    /// Flexible Data Placement: the Placement Identifiers available to writes, one for each
    /// placement handle (and reclaim group). Writes with different identifiers go to different
    /// reclaim units, so that data with a similar lifetime can share them. [`WriteOptions`] take an
    /// index into this list; a raw command carries the identifier itself as the DSPEC of a Data
    /// Placement [`Directive`]. Empty if the drive lacks the feature or has it disabled.
    ///
    /// [`WriteOptions`]: crate::WriteOptions
    /// [`Directive`]: nvme_spec::nvm::Directive
    pub placement_ids: Vec<u16>,
    /// Size of a reclaim unit in bytes (RUNS); 0 = not reported.
    pub reclaim_unit_bytes: u64,
}

/// The namespaces of a controller, by ascending identifier.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    pub(crate) usable: Vec<NamespaceInfo>,
    pub(crate) refused: Vec<(Nsid, NamespaceError)>,
}

impl Namespaces {
    /// Returns a namespace, or why it is not usable.
    pub(crate) fn get(&self, nsid: Nsid) -> Result<&NamespaceInfo, NamespaceError> {
        let refused = || self.refused.iter().find(|(id, _)| *id == nsid).map(|(_, why)| *why);
        let found = self.usable.iter().find(|namespace| namespace.nsid == nsid);
        found.ok_or_else(|| refused().unwrap_or(NamespaceError::Unknown))
    }
}

/// A contiguous range of LBAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LbaRange {
    /// The first LBA.
    pub lba: Lba,
    /// Number of LBAs.
    pub lbas: u64,
}

/// Reasons for which a namespace is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// The controller does not list it.
    #[error("no such active namespace; namespaces() lists those there are")]
    Unknown,
    /// It has another I/O command set than NVM: the same opcodes mean something else there.
    #[error("it is {}; name a namespace of the NVM command set", kind(*csi))]
    CommandSet {
        /// Reported command set.
        csi: CommandSet,
    },
    /// The controller lists it but Identify fails.
    #[error("identify namespace failed: {status}; the other namespaces can be used")]
    Identify {
        /// Completion status.
        status: Status,
    },
    /// NSZE is 0.
    #[error("its size is 0 LBAs; it is not attached or not formatted")]
    Empty,
    /// FLBAS points outside the formats.
    #[error("its format index {index} is not one of its {count} formats")]
    NoFormat {
        /// The index.
        index: usize,
        /// Number of formats.
        count: usize,
    },
    /// LBADS is outside 9 to 16.
    #[error("its LBA size is 2^{lbads} bytes; 512 bytes to 64 KiB (9 to 16) are supported")]
    LbaSize {
        /// Reported LBADS.
        lbads: u8,
    },
    /// The format has metadata.
    #[error("its LBAs carry {bytes} bytes of metadata; format it without metadata (nvme format)")]
    Metadata {
        /// Metadata bytes per LBA.
        bytes: u16,
    },
    /// Protection information is enabled.
    #[error("it uses end-to-end protection (DPS {dps:#x}); format it without (nvme format)")]
    Protection {
        /// Reported DPS.
        dps: u8,
    },
    /// The size in bytes exceeds 64 bits.
    #[error("its size of {lbas} LBAs of 2^{shift} bytes cannot be")]
    TooLarge {
        /// Reported size in LBAs.
        lbas: u64,
        /// log2 of the LBA size.
        shift: u8,
    },
}

/// Returns the words for a namespace of a command set other than NVM.
fn kind(csi: CommandSet) -> String {
    match csi {
        CommandSet::ZONED => "a zoned namespace, which only takes writes in the order of its \
                              zones"
            .to_owned(),
        CommandSet::KEY_VALUE => "a key value namespace".to_owned(),
        CommandSet(csi) => format!("a namespace of the command set {csi:#04x}"),
    }
}

impl NamespaceInfo {
    /// Validates Identify Namespace data.
    ///
    /// # Errors
    /// Returns [`NamespaceError`] if the namespace is unusable.
    pub fn check(nsid: Nsid, data: &IdentifyNamespace) -> Result<Self, NamespaceError> {
        if data.nsze == 0 {
            return Err(NamespaceError::Empty);
        }
        let (index, count) = (data.format_index(), data.nlbaf_z as usize + 1);
        let format = data.active_format().ok_or(NamespaceError::NoFormat { index, count })?;
        let (lbads, bytes, dps) = (format.lbads(), format.ms(), data.dps);
        if !(9..=16).contains(&lbads) {
            return Err(NamespaceError::LbaSize { lbads });
        }
        if bytes > 0 {
            return Err(NamespaceError::Metadata { bytes });
        }
        if dps & 7 != 0 {
            return Err(NamespaceError::Protection { dps });
        }
        if data.nsze > (i64::MAX as u64) >> lbads {
            return Err(NamespaceError::TooLarge { lbas: data.nsze, shift: lbads });
        }
        let optimal = |lbas_z: u16| match data.nsfeat & IdentifyNamespace::OPTPERF {
            0 => 1,
            _ => u32::from(lbas_z) + 1,
        };
        Ok(Self {
            nsid,
            lbas: data.nsze,
            lba_shift: lbads,
            format: index as u8,
            formats: data.lbaf.iter().take(count).copied().collect(),
            deallocated_reads_zero: data.dlfeat & 7 == 1,
            boundary_lbas: data.noiob,
            deallocate_granularity_lbas: optimal(data.npdg_z),
            deallocate_alignment_lbas: optimal(data.npda_z),
            nguid: data.nguid,
            eui64: data.eui64,
            may_be_shared: data.may_be_shared(),
            is_write_protected: data.nsattr & 1 != 0,
            endurance_group: data.endgid,
            placement_ids: Vec::new(),
            reclaim_unit_bytes: 0,
        })
    }

    /// Returns the number of placement handles available to writes.
    #[must_use]
    pub fn placement_handles(&self) -> u16 {
        self.placement_ids.len() as u16
    }

    /// Returns the LBA size in bytes.
    #[must_use]
    pub fn lba_bytes(&self) -> u64 {
        1 << self.lba_shift
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lbas << self.lba_shift
    }
}

#[cfg(test)]
mod tests;
