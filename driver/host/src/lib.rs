//! Userspace NVMe driver: brings a controller up, keeps it healthy, and grants its I/O queues to
//! whoever builds the commands (host threads or a GPU kernel).

mod bus;
mod clock;
mod dma;
mod grant;
pub mod platform;

pub use bus::{Bus, DoorbellPage, Gone, Interrupt, InterruptError};
pub use clock::{Clock, MonotonicClock, Nanos};
pub use dma::{
    DevicePtr, DmaError, DmaMemory, DmaSlice, DmaSpace, ExternalMemory, Iova, IovaRange, Place,
};
pub use grant::{DescriptorMode, QueueGrant, Quiesced};
