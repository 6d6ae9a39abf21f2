//! Controller-side state of queues (Base, "Queuing": submission and completion queues).

use nvme_driver::Iova;

/// Location of a queue's entries.
#[derive(Debug)]
pub(super) struct Ring {
    base: u64,
    /// Pages of a non-contiguous queue; else empty.
    pages: Box<[u64]>,
    page_bytes: u64,
    entry_bytes: u64,
    /// Number of entries.
    pub size: u32,
}

impl Ring {
    pub(super) fn contiguous(base: u64, entry_bytes: u64, size: u32) -> Self {
        Self { base, pages: Box::default(), page_bytes: 0, entry_bytes, size }
    }

    pub(super) fn scattered(pages: Vec<u64>, page_bytes: u64, entry_bytes: u64, size: u32) -> Self {
        Self { base: 0, pages: pages.into(), page_bytes, entry_bytes, size }
    }

    /// Returns the address of entry `index`.
    #[inline]
    pub(super) fn at(&self, index: u32) -> Iova {
        let byte = u64::from(index) * self.entry_bytes;
        if self.pages.is_empty() {
            return Iova(self.base.wrapping_add(byte));
        }
        let page = self.pages[(byte / self.page_bytes) as usize];
        Iova(page.wrapping_add(byte % self.page_bytes))
    }

    /// Returns the index after `index`.
    #[inline]
    pub(super) fn after(&self, index: u32) -> u32 {
        if index + 1 == self.size { 0 } else { index + 1 }
    }

    /// Returns the number of steps forward from `from` to `to`.
    #[inline]
    pub(super) fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from { to - from } else { to + self.size - from }
    }
}

/// Identifiers of a queue's outstanding commands.
#[derive(Debug)]
pub(super) struct CidSet(Box<[u64]>);

impl CidSet {
    fn new() -> Self {
        Self(vec![0; 1 << 10].into())
    }

    /// Inserts `cid`. Returns `false` if it was present.
    #[inline]
    pub(super) fn insert(&mut self, cid: u16) -> bool {
        let word = &mut self.0[usize::from(cid >> 6)];
        let bit = 1 << (cid & 63);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    #[inline]
    pub(super) fn remove(&mut self, cid: u16) {
        self.0[usize::from(cid >> 6)] &= !(1 << (cid & 63));
    }

    /// Returns an identifier that is not outstanding and, if possible, far from `cid`.
    pub(super) fn absent(&self, cid: u16) -> u16 {
        let has = |cid: u16| self.0[usize::from(cid >> 6)] & 1 << (cid & 63) != 0;
        let far = cid ^ 0x8000;
        (0..=u16::MAX).map(|step| far.wrapping_add(step)).find(|cid| !has(*cid)).unwrap_or(far)
    }
}

/// A submission queue.
#[derive(Debug)]
pub(super) struct SubmissionQueue {
    pub ring: Ring,
    pub cqid: u16,
    /// Next entry to fetch.
    pub head: u32,
    /// Last seen tail of the host.
    pub tail: u32,
    /// Last invalid doorbell value.
    pub bad_tail: Option<u32>,
    /// Commands fetched and not completed.
    pub outstanding: u32,
    pub cids: CidSet,
    /// Set while the queue is being deleted: nothing is fetched any more.
    pub deleting: bool,
    /// Set while the next entry waits for a completion slot.
    pub waiting: bool,
}

impl SubmissionQueue {
    pub(super) fn new(ring: Ring, cqid: u16) -> Self {
        Self {
            ring,
            cqid,
            head: 0,
            tail: 0,
            bad_tail: None,
            outstanding: 0,
            cids: CidSet::new(),
            deleting: false,
            waiting: false,
        }
    }

    /// Returns whether there are entries to fetch.
    #[inline]
    pub(super) fn ready(&self) -> bool {
        self.head != self.tail && !self.deleting
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    pub ring: Ring,
    /// Next entry to write.
    pub tail: u32,
    /// First entry not consumed by the host, as last seen.
    pub head: u32,
    /// Last invalid doorbell value.
    pub bad_head: Option<u32>,
    /// Phase of the current pass.
    pub phase: bool,
    /// Entries reserved for commands inside the controller.
    pub reserved: u32,
    /// Vector to signal, if interrupts are enabled.
    pub vector: Option<u16>,
    /// Number of submission queues that complete here.
    pub users: u32,
    /// Set if an entry was posted since the vector was last signalled.
    pub signal: bool,
}

impl CompletionQueue {
    pub(super) fn new(ring: Ring, vector: Option<u16>) -> Self {
        Self {
            ring,
            tail: 0,
            head: 0,
            bad_head: None,
            phase: true,
            reserved: 0,
            vector,
            users: 0,
            signal: false,
        }
    }

    /// Returns the number of entries neither posted nor reserved. One entry always stays empty
    /// ("Full Queue").
    #[inline]
    pub(super) fn free(&self) -> u32 {
        let used = self.ring.distance(self.head, self.tail);
        (self.ring.size - 1).saturating_sub(used + self.reserved)
    }
}

/// All queues by identifier; 0 are the admin queues.
#[derive(Debug, Default)]
pub(super) struct Queues {
    pub sqs: Vec<Option<SubmissionQueue>>,
    pub cqs: Vec<Option<CompletionQueue>>,
    /// Identifiers of existing submission queues, ascending.
    pub active: Vec<u16>,
    /// Identifiers of existing completion queues, ascending.
    pub active_cqs: Vec<u16>,
}

impl Queues {
    pub(super) fn new(io_queues: u16) -> Self {
        let count = usize::from(io_queues) + 1;
        Self {
            sqs: (0..count).map(|_| None).collect(),
            cqs: (0..count).map(|_| None).collect(),
            active: Vec::with_capacity(count),
            active_cqs: Vec::with_capacity(count),
        }
    }

    #[inline]
    pub(super) fn sq(&mut self, qid: u16) -> Option<&mut SubmissionQueue> {
        self.sqs.get_mut(usize::from(qid))?.as_mut()
    }

    #[inline]
    pub(super) fn cq(&mut self, qid: u16) -> Option<&mut CompletionQueue> {
        self.cqs.get_mut(usize::from(qid))?.as_mut()
    }

    pub(super) fn add_sq(&mut self, qid: u16, sq: SubmissionQueue) {
        if let Some(cq) = self.cq(sq.cqid) {
            cq.users += 1;
        }
        self.sqs[usize::from(qid)] = Some(sq);
        if let Err(place) = self.active.binary_search(&qid) {
            self.active.insert(place, qid);
        }
    }

    pub(super) fn add_cq(&mut self, qid: u16, cq: CompletionQueue) {
        self.cqs[usize::from(qid)] = Some(cq);
        if let Err(place) = self.active_cqs.binary_search(&qid) {
            self.active_cqs.insert(place, qid);
        }
    }

    pub(super) fn remove_sq(&mut self, qid: u16) {
        let gone = self.sqs.get_mut(usize::from(qid)).and_then(Option::take);
        if let Some(cq) = gone.and_then(|sq| self.cq(sq.cqid)) {
            cq.users -= 1;
        }
        self.active.retain(|active| *active != qid);
    }

    pub(super) fn remove_cq(&mut self, qid: u16) {
        if let Some(cq) = self.cqs.get_mut(usize::from(qid)) {
            *cq = None;
        }
        self.active_cqs.retain(|active| *active != qid);
    }

    /// Returns whether any I/O queue exists.
    pub(super) fn any_io(&self) -> bool {
        self.sqs.iter().skip(1).any(Option::is_some) || self.cqs.iter().skip(1).any(Option::is_some)
    }

    /// Deletes all queues.
    pub(super) fn clear(&mut self) {
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.active.clear();
        self.active_cqs.clear();
    }
}
