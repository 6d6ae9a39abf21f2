//! Progress of a step, and counters of a controller.

use nvme_driver::Nanos;

/// Progress of one [`crate::Emu::step`], and the time of the next useful one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Commands fetched, completions posted and state changes made. 0: no progress.
    pub work: u32,
    /// Commands in the controller or its media that are not completed yet.
    pub outstanding: u32,
    /// Time of the next state change without a host access (such as the end of a delay), if known.
    pub next_event: Option<Nanos>,
    /// Set if a doorbell can bring work. If not (disabled, failed, gone), only a register write
    /// can, and the thread that drives the controller may sleep until one.
    pub listening: bool,
}

impl Progress {
    /// Adds the progress of another controller driven by the same loop.
    pub(crate) fn merge(&mut self, other: Self) {
        self.work += other.work;
        self.outstanding += other.outstanding;
        self.listening |= other.listening;
        self.next_event = match (self.next_event, other.next_event) {
            (Some(mine), Some(its)) => Some(mine.min(its)),
            (mine, its) => mine.or(its),
        };
    }
}

/// Counters of a controller since its creation. Resets do not clear them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EmuCounters {
    /// Commands fetched from all queues.
    pub commands: u64,
    /// Admin commands among them.
    pub admin_commands: u64,
    /// Read commands completed without error.
    pub reads: u64,
    /// Write commands completed without error.
    pub writes: u64,
    /// Flush commands completed without error.
    pub flushes: u64,
    /// Bytes moved by reads, excluding bit buckets.
    pub bytes_read: u64,
    /// Bytes moved by writes.
    pub bytes_written: u64,
    /// Completion entries written.
    pub completions: u64,
    /// Completions with a status other than success.
    pub errors: u64,
    /// Times a new value of a submission tail doorbell was seen.
    pub sq_doorbells: u64,
    /// Times a new value of a completion head doorbell was seen.
    pub cq_doorbells: u64,
    /// Times a command waited because its completion queue was full.
    pub cq_full_waits: u64,
    /// Largest number of commands fetched after one poll of a doorbell.
    pub batch_max: u64,
    /// Memory accesses that the domain refused.
    pub refused_dma: u64,
    /// Copies between this process and a GPU, for memory that only a GPU can address.
    pub copies: u64,
    /// Batches of these copies.
    pub copy_batches: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Commands for which a fault rule fired, also if its action does not apply to them.
    pub faults: u64,
    /// Controller resets and shutdowns.
    pub resets: u64,
    /// Resets of the NVM subsystem among them.
    pub subsystem_resets: u64,
}
