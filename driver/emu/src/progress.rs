//! What a step did, and what a controller has done so far.

use nvme_driver::Nanos;

/// What one [`crate::Emu::step`] did, and when the next one is worth while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Commands fetched, completions posted and state changes made. 0: nothing moved.
    pub work: u32,
    /// Commands inside the controller or its media that have not been completed yet.
    pub outstanding: u32,
    /// When the next state change without a host access is due (a delay ends), if that is known.
    pub next_event: Option<Nanos>,
    /// Whether a doorbell can bring work. When not (disabled, failed, gone), nothing but a register
    /// write can, and the thread that drives the controller may sleep until one.
    pub listening: bool,
}

impl Progress {
    /// Adds what another controller driven by the same loop did.
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

/// What a controller has done since it was made. Resets do not clear it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EmuCounters {
    /// Commands fetched from all queues.
    pub commands: u64,
    /// Of these, admin commands.
    pub admin_commands: u64,
    /// Read commands completed without error.
    pub reads: u64,
    /// Write commands completed without error.
    pub writes: u64,
    /// Flush commands completed without error.
    pub flushes: u64,
    /// Bytes moved by reads, bit buckets left out.
    pub bytes_read: u64,
    /// Bytes moved by writes.
    pub bytes_written: u64,
    /// Completion entries written.
    pub completions: u64,
    /// Of these, with a status other than success.
    pub errors: u64,
    /// Times a submission tail doorbell was seen to have a new value.
    pub sq_doorbells: u64,
    /// Times a completion head doorbell was seen to have a new value.
    pub cq_doorbells: u64,
    /// Times a command waited because its completion queue was full.
    pub cq_full_waits: u64,
    /// Largest number of commands fetched after one poll of a doorbell.
    pub batch_max: u64,
    /// Accesses to memory that the domain refused.
    pub refused_dma: u64,
    /// Copies between this process and a GPU, for memory that only a GPU addresses.
    pub copies: u64,
    /// Batches that they were started in.
    pub copy_batches: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Commands that a fault rule changed.
    pub faults: u64,
    /// Controller resets and shutdowns seen.
    pub resets: u64,
    /// Of these, resets of the NVM subsystem.
    pub subsystem_resets: u64,
}
