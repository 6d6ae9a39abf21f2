//! A controller that completes immediately and moves no data, to isolate the driver's own path.

use std::sync::Arc;

use anyhow::Result;
use nvme_driver::{
    Bus, DescriptorMode, DmaSlice, DmaSpace, DoorbellPage, Gone, GrantEpoch, Interrupt,
    InterruptError, Place, Placements, QueueGrant, ResetError,
};
use nvme_emu::EmuDomain;
use nvme_spec::ids::{Nsid, QueueId};

/// Identifier of the only queue pair.
pub const QID: QueueId = QueueId(1);
const DESCRIPTOR_BYTES: u32 = 4096;
/// Log2 of the LBA size.
pub const LBA_SHIFT: u8 = 12;

/// A queue pair and the drive's side of it.
#[derive(Debug)]
pub struct Instant {
    domain: Arc<EmuDomain>,
    sq: DmaSlice,
    cq: DmaSlice,
    descriptors: DmaSlice,
    doorbells: DmaSlice,
    depth: u32,
    head: u32,
    tail: u32,
    completed: u64,
}

impl Instant {
    /// Creates a queue pair of `depth` entries, a power of two.
    pub fn new(depth: u32) -> Result<Self> {
        let domain = EmuDomain::new("instant");
        let alloc = |bytes: u32| -> Result<DmaSlice> {
            Ok(DmaSlice::whole(domain.alloc(bytes as usize)?)?)
        };
        let (sq, cq) = (alloc(depth * 64)?, alloc(depth * 16)?);
        let (descriptors, doorbells) = (alloc(depth * DESCRIPTOR_BYTES)?, alloc(4096)?);
        Ok(Self { domain, sq, cq, descriptors, doorbells, depth, head: 0, tail: 0, completed: 0 })
    }

    /// Returns the memory of the submission and completion queues.
    pub fn queues(&self) -> (DmaSlice, DmaSlice) {
        (self.sq.clone(), self.cq.clone())
    }

    /// Returns a bus that has only the doorbells.
    pub fn bus(&self) -> Arc<dyn Bus> {
        Arc::new(DoorbellBus {
            space: self.domain.clone() as Arc<dyn DmaSpace>,
            doorbells: self.doorbells.clone(),
        })
    }

    /// Returns the executor's grant of the queue.
    pub fn grant(&self) -> Result<QueueGrant> {
        let doorbell = |is_cq: usize| -> Result<_> {
            Ok(self.doorbells.slice((usize::from(QID.0) * 2 + is_cq) * 4, 4)?.place())
        };
        let [sq, cq, descriptors] =
            [&self.sq, &self.cq, &self.descriptors].map(|slice| slice.place());
        let places = [sq, cq, doorbell(0)?, doorbell(1)?, descriptors];
        Ok(grant(QID, places, DESCRIPTOR_BYTES, self.depth))
    }

    /// Completes all submitted commands in order. Returns their number.
    pub fn complete(&mut self) -> Result<u32> {
        let access = self.domain.access();
        let doorbell = self.doorbells.iova().offset(u64::from(QID.0) * 8);
        let tail = access.load_acquire32(doorbell)?;
        let mut count = 0;
        while self.head != tail {
            let sqe = self.sq.iova().offset(u64::from(self.head) * 64);
            let cid = access.read_u32(sqe)? >> 16;
            self.head = (self.head + 1) % self.depth;
            let cqe = self.cq.iova().offset(u64::from(self.tail % self.depth) * 16);
            let phase = u32::from((self.tail / self.depth).is_multiple_of(2));
            access.write_u32(cqe.offset(8), self.head | u32::from(QID.0) << 16)?;
            access.store_release32(cqe.offset(12), cid | phase << 16)?;
            // Counts two passes modulo, so that the phase follows from it.
            self.tail = (self.tail + 1) % (2 * self.depth);
            count += 1;
        }
        self.completed += u64::from(count);
        Ok(count)
    }

    /// Returns the number of completed commands.
    pub fn completed(&self) -> u64 {
        self.completed
    }
}

/// Returns the grant of a queue of a controller that completes immediately: its places, which are
/// submission and completion queue, their doorbells, and descriptors of so many bytes each.
pub fn grant(
    qid: QueueId,
    [sq, cq, sq_doorbell, cq_doorbell, descriptors]: [Place; 5],
    descriptor_bytes: u32,
    depth: u32,
) -> QueueGrant {
    QueueGrant {
        epoch: GrantEpoch::new(),
        qid,
        sq,
        cq,
        sq_doorbell,
        cq_doorbell,
        descriptors,
        descriptor_bytes,
        depth,
        nsid: Nsid(1),
        lba_shift: LBA_SHIFT,
        lbas: 1 << 40,
        boundary_lbas: 0,
        transfer_bytes_max: 512 << 10,
        descriptor_mode: DescriptorMode::Sgl { bit_bucket: true, granularity: 1 },
        placements: Placements::default(),
    }
}

/// Doorbells at the start of a page; other registers do not respond.
#[derive(Debug)]
struct DoorbellBus {
    space: Arc<dyn DmaSpace>,
    doorbells: DmaSlice,
}

impl Bus for DoorbellBus {
    fn id(&self) -> &str {
        "instant"
    }

    fn read32(&self, _offset: u32) -> Result<u32, Gone> {
        Err(Gone)
    }

    fn write32(&self, _offset: u32, _value: u32) -> Result<(), Gone> {
        Err(Gone)
    }

    #[allow(unsafe_code, reason = "vouches for the doorbells")]
    fn doorbells(&self) -> DoorbellPage {
        let host = self.doorbells.host().expect("the software domain is host memory").cast();
        let owner = Arc::new(self.doorbells.clone());
        // SAFETY: the slice keeps the memory mapped, and no reference to it exists.
        unsafe { DoorbellPage::new(host, None, 4, self.doorbells.len(), owner) }
    }

    fn dma(&self) -> &Arc<dyn DmaSpace> {
        &self.space
    }

    fn pci_id(&self) -> Option<(u16, u16)> {
        None
    }

    fn numa_node(&self) -> Option<u32> {
        None
    }

    fn requested(&self) -> bool {
        false
    }

    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        Err(InterruptError::NoSuchVector { bus: self.id().into(), vector, available: 0 })
    }

    fn reset(&self) -> Result<(), ResetError> {
        Err(ResetError::Unsupported { bus: self.id().into() })
    }

    fn pcie_error(&self) -> bool {
        false
    }
}
