//! A test of the I/O kernel with one drive, without a store.

use std::sync::Arc;

use gio_kernels::cuda::DoorbellKind;
use gio_uring::{IoExecutor, Uring, UringOptions};
use nvme_driver::{
    Clock, Controller, DmaMemory, DmaSlice, Error, MonotonicClock, Nanos, Quiesced,
    platform::buffer::Buffer,
};
use nvme_spec::ids::{Lba, Nsid, QueueId};
use objstore::kernel_read;

use crate::{
    arena::Arena,
    error::StackError,
    gpu::{CudaChoice, Gpu},
};

/// Entries of the queue.
const DEPTH: u32 = 16;
/// Time limit for a kernel to end.
const STOP_TIMEOUT: Nanos = Nanos::from_millis(15_000);

/// Returns the bytes of memory that [`try_kernel`] needs for a drive.
#[must_use]
pub fn trial_bytes(drive: &Controller) -> usize {
    let shift = drive.namespaces().first().map_or(12, |space| space.lba_shift);
    // Parts begin at GPU pages.
    Arena::queue_bytes(DEPTH) + (1_usize << shift).next_multiple_of(64 << 10)
}

/// Tests whether the I/O kernel on `gpu` and a drive reach each other: with a queue in `memory`, of
/// at least [`trial_bytes`], the kernel reads the drive's first LBA into `memory` as well. Returns
/// `None` if so, else the reason. Writes nothing to the drive, and leaves it ready.
///
/// # Errors
/// Returns [`StackError::Cuda`] if the GPU cannot map the doorbells or run the kernel, or
/// [`StackError::Failed`] if the drive can no longer be used.
pub fn try_kernel(
    drive: &mut Controller,
    gpu: &Gpu,
    choice: CudaChoice,
    memory: &Arc<dyn DmaMemory>,
) -> Result<Option<String>, StackError> {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let _doorbells = gpu.device().register_doorbells(&drive.bus().clone(), DoorbellKind::Io)?;
    let executor = Box::new(gpu.executor(choice, clock.clone())?);
    run(drive, executor, clock, memory)
}

fn run(
    drive: &mut Controller,
    executor: Box<dyn IoExecutor>,
    clock: Arc<dyn Clock>,
    memory: &Arc<dyn DmaMemory>,
) -> Result<Option<String>, StackError> {
    let failed = |error: Error| StackError::failed("trying the I/O kernel", error);
    let Some(space) = drive.namespaces().first() else {
        return Ok(Some("it has no namespace that can be used".to_owned()));
    };
    let (nsid, lba_bytes) = (space.nsid, 1 << space.lba_shift);
    let mut expected = vec![0; lba_bytes];
    drive.read(nsid, Lba(0), &mut expected).map_err(failed)?;
    let mut arena = Arena::new(memory.clone());
    let queue = arena.queue(DEPTH)?;
    let slice = arena.take(lba_bytes)?;
    let Some(mut buffer) = Buffer::new(slice.clone()) else {
        return Ok(Some("this process cannot look at the memory".to_owned()));
    };
    let opposite: Vec<u8> = expected.iter().map(|byte| !byte).collect();
    buffer.write(0, &opposite)?;
    let qid = drive.create_queue_pair_in(queue).map_err(failed)?;
    let tried = read(drive, (qid, nsid), executor, clock, &slice);
    let (why, quiesced) = match tried {
        Ok((read, quiesced)) => (read.err(), quiesced),
        Err(error) => {
            // The kernel may still run, and the drive may still write.
            std::mem::forget(memory.clone());
            return Err(error);
        }
    };
    if drive.reclaim(qid, &quiesced).is_err() {
        drive.recover(&quiesced).map_err(failed)?;
        drive.reclaim(qid, &quiesced).map_err(failed)?;
    }
    let mut found = vec![0; lba_bytes];
    buffer.read(0, &mut found)?;
    let differs = (found != expected)
        .then(|| "the I/O kernel's read was completed, and its bytes are wrong".to_owned());
    Ok(why.or(differs))
}

/// Starts a kernel that reads the first LBA into `into`, and ends it.
#[allow(unsafe_code, reason = "only the grantor knows that no executor was started")]
fn read(
    drive: &mut Controller,
    (qid, nsid): (QueueId, Nsid),
    executor: Box<dyn IoExecutor>,
    clock: Arc<dyn Clock>,
    into: &DmaSlice,
) -> Result<(Result<(), String>, Quiesced), StackError> {
    let failed = |error: Error| StackError::failed("trying the I/O kernel", error);
    let grant = drive.grant(qid, nsid).map_err(failed)?;
    let epoch = grant.epoch;
    // After the read, and before the kernel is ended.
    let command_timeout = Nanos::from_millis(11_000);
    let options = UringOptions { command_timeout, explicit_max: 1, ..UringOptions::default() };
    match Uring::init_queue(1, executor, clock, &[(0, grant)], options) {
        Ok(mut ring) => {
            let read = kernel_read(&mut ring, 0, Lba(0), into);
            let quiesced = ring.stop(ring.now() + STOP_TIMEOUT).map_err(|error| {
                StackError::unfit(format!("the I/O kernel does not end: {error}"), "")
            })?;
            Ok((read, quiesced))
        }
        Err(error) => {
            // SAFETY: a ring whose setup failed started nothing (`IoExecutor::start`).
            let quiesced = unsafe { Quiesced::assert([epoch]) };
            Ok((Err(format!("starting the I/O kernel: {error}")), quiesced))
        }
    }
}

#[cfg(test)]
mod tests {
    use gio_kernels::{HostExecutor, HostOptions};
    use nvme_driver::ControllerOptions;
    use nvme_emu::{EmuConfig, FaultAction, FaultPlan, FaultRule, FaultWhen, MemoryMedia};

    use super::*;
    use crate::devices::Devices;

    /// Tries a drive with these faults, and once more without them.
    fn tried(faults: FaultPlan) -> [Option<String>; 2] {
        let media = MemoryMedia::new(1 << 20).unwrap();
        media.poke(0, &[0x5a; 4096]).unwrap();
        let config = EmuConfig::new("drive").namespace(media, 4096);
        let mut devices = Devices::from(vec![config]);
        devices.attach(&ControllerOptions::default(), None).unwrap();
        let (attached, space) = devices.take_attached().unwrap();
        let (emu, clock) = (devices.emus()[0].clone(), devices.clock());
        let mut drive = attached[0].controller.lock();
        let memory = space.alloc(trial_bytes(&drive)).unwrap();
        [faults, FaultPlan::default()].map(|faults| {
            emu.set_faults(faults);
            let executor = Box::new(HostExecutor::new(HostOptions::default(), clock.clone()));
            run(&mut drive, executor, clock.clone(), &memory).unwrap()
        })
    }

    fn of_reads(nth: u64, action: FaultAction) -> FaultPlan {
        let when = FaultWhen { admin: Some(false), nth: Some(nth), ..FaultWhen::default() };
        let rules = vec![FaultRule::new(when, action)];
        FaultPlan { seed: 1, rules, ..FaultPlan::default() }
    }

    #[test]
    fn a_drive_that_the_kernel_reaches() {
        assert_eq!(tried(FaultPlan::default()), [None, None]);
    }

    /// The driver's own read, which is the first one, still works.
    #[test]
    fn a_drive_that_does_not_answer_the_kernel_is_found_and_is_ready_afterwards() {
        let [why, then] = tried(of_reads(2, FaultAction::Drop));
        let why = why.expect("no completion");
        assert!(why.contains("saw no completion") && why.contains("10000 ms"), "{why}");
        assert_eq!(then, None);
    }
}
