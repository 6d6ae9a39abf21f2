//! The proof that the I/O kernel itself reaches a device.

use gio_uring::{Error, Uring, abi::IoCtx};
use nvme_driver::{DmaSlice, Nanos};
use nvme_spec::{ids::Lba, nvm::Direction};

/// Time limit of the read. On a busy machine the threads of a software controller wait for seconds.
const TIMEOUT: Nanos = Nanos::from_millis(10_000);

/// Has the I/O kernel read one LBA, at `lba` of device number `device`, into `memory`, which has
/// that length. Comparing the data is left to the caller.
///
/// # Errors
/// Returns a message if the read was not completed without an error within 10 s. The device may
/// then still write to `memory`, until the ring is stopped and the queues are taken back.
pub fn kernel_read(
    ring: &mut Uring,
    device: u32,
    lba: Lba,
    memory: &DmaSlice,
) -> Result<(), String> {
    let bytes = u32::try_from(memory.len()).map_err(|error| error.to_string())?;
    let context = IoCtx { iova: memory.iova().0, lba: lba.0, bytes, device };
    let submitted = ring.submit_explicit(Direction::Read, false, &[context]);
    let id = submitted.map_err(|error| error.to_string())?;
    match ring.wait_completion(id, ring.now() + TIMEOUT) {
        Ok(done) => match done.error {
            None if done.is_ok() => Ok(()),
            None => Err("the I/O kernel's read of one LBA moved nothing".to_owned()),
            Some((status, _)) => Err(format!("the I/O kernel's read of one LBA failed: {status}")),
        },
        Err(Error::Timeout { .. }) => Err(format!(
            "the I/O kernel ({}) saw no completion of a read within {} ms: its doorbell does not \
             reach the drive, or the drive does not reach its queue",
            ring.executor_name(),
            TIMEOUT.0 / 1_000_000
        )),
        Err(error) => Err(error.to_string()),
    }
}
