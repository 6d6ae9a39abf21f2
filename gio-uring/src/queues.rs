//! Validation of granted queues, and their layout as the kernel's warps.

use nvme_driver::{DescriptorMode, GrantEpoch, Place, QueueGrant};
use nvme_spec::ids::{Cid, QueueId};

use crate::{
    abi::{self, OpProgress, Slot, Warp},
    counters::{Counters, Fault, FaultInfo, Outstanding, QueueCounters},
    error::Error,
    executor::{ExecutorError, IoExecutor},
    layout::APART,
    shared::Region,
    sync::Ordering,
};

/// [`Slot::state`] of a command whose warp waits for its completion.
const SLOT_OUTSTANDING: u32 = 1;
/// A deeper queue would leave fewer than two generation bits in a CID.
const DEPTH_MAX: u32 = 1 << 14;

/// Properties common to all queues of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device {
    pub nsid: u32,
    pub lba_shift: u8,
    pub lbas: u64,
    pub mode: DescriptorMode,
}

/// The warps of a ring, one per queue, and their shared counters, in memory near the kernel.
#[derive(Debug)]
pub(crate) struct Queues {
    region: Region,
    cq_tail: usize,
    progress: usize,
    /// Device and queue of each warp.
    ids: Vec<(u32, u16)>,
    /// Offset and number of each warp's slots.
    slots: Vec<(usize, u32)>,
    /// Epochs of the grants.
    pub grants: Vec<GrantEpoch>,
    pub devices: Vec<Device>,
}

impl Queues {
    /// Validates the grants and writes a warp for each, and an initial [`OpProgress`] for each of
    /// `depth` IOCBs. Must be called before the kernel starts.
    pub(crate) fn lay_out(
        grants: &[(u32, QueueGrant)],
        depth: u32,
        executor: &dyn IoExecutor,
    ) -> Result<Self, Error> {
        let devices = devices(grants)?;
        // Before the allocation, which may reuse the memory of the previous queues.
        let mut warps = Vec::with_capacity(grants.len());
        for (device, grant) in grants {
            warps.push(warp(*device, grant, executor)?);
        }
        let cq_tail = grants.len() * size_of::<Warp>();
        let progress = cq_tail + APART;
        let mut len = progress + depth as usize * size_of::<OpProgress>();
        let mut slots_at = Vec::with_capacity(grants.len());
        for (_, grant) in grants {
            // Slots, then the stack of free slots; each queue starts on its own cache line pair.
            len = len.next_multiple_of(APART);
            slots_at.push(len);
            len += grant.depth as usize * (size_of::<Slot>() + size_of::<u16>());
        }
        let region = Region::whole(executor.alloc_state(len)?);
        let ready = OpProgress { warps_left: grants.len() as u32, ..OpProgress::default() };
        for index in 0..depth as usize {
            region.put(progress, index, ready);
        }
        for (index, (device, grant)) in grants.iter().enumerate() {
            let of_device = |(other, _): &&(u32, QueueGrant)| other == device;
            let part = grants[..index].iter().filter(of_device).count() as u32;
            let parts = grants.iter().filter(of_device).count() as u32;
            let mut warp = warps[index];
            (warp.part, warp.parts) = (part, parts);
            let depth = grant.depth as usize;
            let stack_at = slots_at[index] + depth * size_of::<Slot>();
            warp.slots = region.address(slots_at[index]);
            warp.free_slots = region.address(stack_at);
            // One slot fewer than the queue has entries: a full queue holds depth - 1 commands. The
            // omitted slot is the one whose CID could be FFFFh, which the error log reserves.
            warp.free_count = grant.depth - 1;
            for at in 0..depth - 1 {
                region.put(stack_at, at, (depth - 2 - at) as u16);
            }
            region.put(0, index, warp);
        }
        region.push()?;
        let ids = grants.iter().map(|(device, grant)| (*device, grant.qid.0)).collect();
        let depths = grants.iter().map(|(_, grant)| grant.depth);
        let slots = slots_at.into_iter().zip(depths).collect();
        let grants = grants.iter().map(|(_, grant)| grant.epoch).collect();
        Ok(Self { region, cq_tail, progress, ids, slots, grants, devices })
    }

    /// Returns the number of warps.
    pub(crate) fn len(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Returns a handle that keeps the warps' memory alive.
    pub(crate) fn memory(&self) -> Region {
        self.region.clone()
    }

    /// Returns the addresses of the warps, the IOCBs' progress, and the completion ring's tail.
    pub(crate) fn addresses(&self) -> [u64; 3] {
        [0, self.progress, self.cq_tail].map(|offset| self.region.address(offset))
    }

    /// Updates the host's copy of the kernel's state.
    fn pull(&self) {
        if let Err(error) = self.region.pull() {
            tracing::debug!(%error, "what the warps say is of an earlier time");
        }
    }

    fn word32(&self, warp: usize, offset: usize) -> u32 {
        // Relaxed: a snapshot of one word; no other word depends on it.
        self.region.load32(warp * size_of::<Warp>() + offset, Ordering::Relaxed)
    }

    fn word64(&self, warp: usize, offset: usize) -> u64 {
        // Relaxed: as above.
        self.region.load64(warp * size_of::<Warp>() + offset, Ordering::Relaxed)
    }

    /// Returns true if no working warp has commands outstanding.
    pub(crate) fn are_idle(&self) -> bool {
        self.pull();
        (0..self.ids.len()).all(|warp| {
            let outstanding = self.word32(warp, std::mem::offset_of!(Warp, outstanding));
            let fault = self.word32(warp, std::mem::offset_of!(Warp, fault));
            outstanding == 0 || fault != abi::FAULT_NONE
        })
    }

    /// Returns the first failed queue.
    pub(crate) fn faulted(&self) -> Option<FaultInfo> {
        self.pull();
        (0..self.ids.len()).find_map(|warp| {
            let fault = Fault::decode(self.word32(warp, std::mem::offset_of!(Warp, fault)))?;
            let quarantined = self.word32(warp, std::mem::offset_of!(Warp, quarantined));
            let (device, qid) = self.ids[warp];
            Some(FaultInfo { device, qid, fault, quarantined })
        })
    }

    /// Returns the commands in flight. A command in flight during the whole call is included.
    pub(crate) fn outstanding(&self) -> Vec<Outstanding> {
        self.pull();
        let mut found = Vec::new();
        for (&(device, qid), &(first, depth)) in self.ids.iter().zip(&self.slots) {
            for slot in 0..depth {
                let at = first + slot as usize * size_of::<Slot>();
                // Relaxed: a snapshot, as above. Generation and state are one word.
                let word = self.region.load32(at, Ordering::Relaxed);
                if word >> 16 == SLOT_OUTSTANDING {
                    let cid = Cid(((word & 0xffff) << depth.ilog2() | slot) as u16);
                    let since = at + std::mem::offset_of!(Slot, since_ns);
                    // Relaxed: may for a moment be the time of the slot's next command.
                    let since_ns = self.region.load64(since, Ordering::Relaxed);
                    found.push(Outstanding { device, qid: QueueId(qid), cid, since_ns });
                }
            }
        }
        found
    }

    /// Returns the counters of each warp.
    pub(crate) fn counters(&self) -> Vec<QueueCounters> {
        self.pull();
        let queue = |(warp, &(device, qid)): (usize, &(u32, u16))| {
            let count = |offset| self.word64(warp, offset);
            QueueCounters {
                device,
                qid,
                outstanding: self.word32(warp, std::mem::offset_of!(Warp, outstanding)),
                quarantined: self.word32(warp, std::mem::offset_of!(Warp, quarantined)),
                fault: Fault::decode(self.word32(warp, std::mem::offset_of!(Warp, fault))),
                counters: Counters {
                    commands: count(std::mem::offset_of!(Warp, commands)),
                    objects: count(std::mem::offset_of!(Warp, objects)),
                    bytes_read: count(std::mem::offset_of!(Warp, bytes_read)),
                    bytes_written: count(std::mem::offset_of!(Warp, bytes_written)),
                    sq_doorbells: count(std::mem::offset_of!(Warp, sq_doorbells)),
                    cq_doorbells: count(std::mem::offset_of!(Warp, cq_doorbells)),
                    errors: count(std::mem::offset_of!(Warp, errors)),
                    late: count(std::mem::offset_of!(Warp, late)),
                },
            }
        };
        self.ids.iter().enumerate().map(queue).collect()
    }
}

/// Returns the devices behind the grants. They must be 0 .. N without gaps, with consistent queues.
pub(crate) fn devices(grants: &[(u32, QueueGrant)]) -> Result<Vec<Device>, Error> {
    if grants.is_empty() || grants.len() > usize::from(u16::MAX) {
        let problem = format!("{} queues were granted; 1 to 65535 are needed", grants.len());
        return Err(Error::Grants { problem });
    }
    let mut devices: Vec<Option<Device>> = Vec::new();
    for (device, grant) in grants {
        check(*device, grant)?;
        let found = Device {
            nsid: grant.nsid.0,
            lba_shift: grant.lba_shift,
            lbas: grant.lbas,
            mode: grant.descriptor_mode,
        };
        // Numbers must be dense, so none can reach the number of queues.
        let index = *device as usize;
        if index >= grants.len() {
            let problem = format!(
                "device {device} was named, but {} queues cannot cover devices 0 to {device}; \
                 number the devices from 0 without holes",
                grants.len()
            );
            return Err(Error::Grants { problem });
        }
        if devices.len() <= index {
            devices.resize(index + 1, None);
        }
        match devices[index] {
            None => devices[index] = Some(found),
            Some(known) if known == found => {}
            Some(known) => {
                let problem = format!("it says {found:?}, another queue of the device {known:?}");
                return Err(unusable(*device, grant, problem));
            }
        }
    }
    let missing = devices.iter().position(Option::is_none);
    if let Some(missing) = missing {
        let problem = format!(
            "no queue of device {missing} was granted; number the devices from 0 without holes"
        );
        return Err(Error::Grants { problem });
    }
    Ok(devices.into_iter().flatten().collect())
}

fn unusable(device: u32, grant: &QueueGrant, problem: String) -> Error {
    Error::Grants { problem: format!("device {device} queue {}: {problem}", grant.qid) }
}

/// Checks a grant's own fields.
fn check(device: u32, grant: &QueueGrant) -> Result<(), Error> {
    let wrong = |problem| Err(unusable(device, grant, problem));
    let depth = grant.depth;
    if !depth.is_power_of_two() || !(2..=DEPTH_MAX).contains(&depth) {
        return wrong(format!(
            "its depth is {depth}; a power of two from 2 to {DEPTH_MAX} is needed"
        ));
    }
    if !(9..=16).contains(&grant.lba_shift) {
        return wrong(format!("its LBAs have 2^{} bytes; 2^9 to 2^16 work", grant.lba_shift));
    }
    let lba_bytes = 1u32 << grant.lba_shift;
    let transfer = grant.transfer_bytes_max;
    if transfer == 0 || !transfer.is_multiple_of(lba_bytes) {
        return wrong(format!(
            "its longest transfer is {transfer} bytes; a multiple of the LBA size {lba_bytes} is \
             needed"
        ));
    }
    let (unit, page) = match grant.descriptor_mode {
        DescriptorMode::Sgl { granularity, .. } => {
            if !matches!(granularity, 1 | 4) {
                return wrong(format!("its SGL granularity is {granularity}; 1 or 4 is needed"));
            }
            // An object and its padding.
            (32, u32::MAX)
        }
        DescriptorMode::Prp { page_bytes } => {
            if !page_bytes.is_power_of_two() || page_bytes < 4096 {
                return wrong(format!(
                    "its memory page has {page_bytes} bytes; a power of two from 4096 on is needed"
                ));
            }
            (8, page_bytes)
        }
    };
    let bytes = grant.descriptor_bytes;
    if !bytes.is_power_of_two() || bytes < unit || bytes > page {
        return wrong(format!(
            "its descriptor areas have {bytes} bytes; a power of two from {unit} on, and at most \
             one memory page, is needed"
        ));
    }
    Ok(())
}

/// Builds the host's half of a warp, with the addresses used by the executor's kernel.
fn warp(device: u32, grant: &QueueGrant, executor: &dyn IoExecutor) -> Result<Warp, Error> {
    let qid = grant.qid.0;
    let reach = |place: &Place, what, align: u64| -> Result<u64, Error> {
        let executor_name = executor.name();
        let address = executor.address(place).ok_or(ExecutorError::Unreachable {
            executor: executor_name,
            what,
            qid,
        })?;
        if address == 0 || !address.is_multiple_of(align) {
            let problem = format!(
                "its {what} is at {address:#x} for the {executor_name} executor; a multiple of \
                 {align} is needed"
            );
            return Err(unusable(device, grant, problem));
        }
        Ok(address)
    };
    let (mode, page_bytes, bit_bucket) = match grant.descriptor_mode {
        DescriptorMode::Sgl { bit_bucket, .. } => (abi::DESC_SGL, 0, u32::from(bit_bucket)),
        DescriptorMode::Prp { page_bytes } => (abi::DESC_PRP, page_bytes, 0),
    };
    let align = u64::from(grant.descriptor_bytes.min(4096));
    if !grant.descriptors.iova.0.is_multiple_of(align) {
        let problem = format!(
            "its descriptor areas are at IOVA {}; a multiple of {align} is needed",
            grant.descriptors.iova
        );
        return Err(unusable(device, grant, problem));
    }
    Ok(Warp {
        sq: reach(&grant.sq, "submission queue", 64)?,
        cq: reach(&grant.cq, "completion queue", 16)?,
        sq_doorbell: reach(&grant.sq_doorbell, "submission doorbell", 4)?,
        cq_doorbell: reach(&grant.cq_doorbell, "completion doorbell", 4)?,
        descriptors: reach(&grant.descriptors, "descriptor memory", 16)?,
        descriptors_iova: grant.descriptors.iova.0,
        descriptor_bytes: grant.descriptor_bytes,
        depth_log2: grant.depth.ilog2(),
        nsid: grant.nsid.0,
        lba_shift: u32::from(grant.lba_shift),
        lbas: grant.lbas,
        transfer_bytes_max: grant.transfer_bytes_max,
        descriptor_mode: mode,
        page_bytes,
        bit_bucket,
        qid: u32::from(qid),
        device,
        boundary_lbas: grant.boundary_lbas,
        placements: grant.placements.count,
        placement_ids: grant.placements.ids,
        cursor_active: abi::WINDOW as u32,
        ..Warp::default()
    })
}
