//! Checks of a measurement, against the devices' counters and contents.

use std::time::Duration;

use nvme_driver::Controller;
use nvme_spec::ids::Lba;
use objstore::SharedController;
use ripieno_stack::Executor;

use super::load::{Bench, Load, Sampled};

/// Transfers whose bytes are compared, at most.
const SAMPLE: usize = 64;
/// Bytes of one of the SMART log's data units.
const UNIT_BYTES: u64 = 512_000;
/// Attempts to read a SMART log that lags behind, and the time between them.
const ATTEMPTS: u32 = 20;
const DELAY: Duration = Duration::from_millis(100);

/// Counts of what was sent to the devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) commands: u64,
    /// Bytes read, and written.
    pub(super) bytes: [u64; 2],
    /// Bytes of reads that end in bit buckets. A device may leave them out of its SMART log.
    pub(super) discarded: u64,
    pub(super) errors: u64,
}

/// Counters of the devices, and of what was sent to them.
#[derive(Debug, Clone)]
pub(super) struct Counted {
    /// None of devices without a log: see [`is_logged`].
    devices: Vec<Smart>,
    sent: Sent,
}

/// Counters of a SMART log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Smart {
    commands: [u64; 2],
    units: [u64; 2],
}

/// Result of the checks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Problems; a measurement with any has no figures.
    pub(super) wrong: Vec<String>,
    /// Bytes whose contents were compared.
    pub(super) compared: u64,
    /// Transfers of the sample that were all zeros, and all transfers of the sample.
    pub(super) zeros: u64,
    pub(super) sampled: u64,
}

impl Smart {
    fn read(controller: &SharedController) -> Result<Self, nvme_driver::Error> {
        let log = controller.lock().smart_log()?;
        let low = |wide: [u8; 16]| u128::from_le_bytes(wide) as u64;
        Ok(Self {
            commands: [low(log.host_reads), low(log.host_writes)],
            units: [low(log.data_units_read), low(log.data_units_written)],
        })
    }
}

impl Counted {
    pub(super) fn read<'a>(
        controllers: impl Iterator<Item = &'a SharedController>,
        sent: Sent,
    ) -> Result<Self, nvme_driver::Error> {
        Ok(Self { devices: controllers.map(Smart::read).collect::<Result<_, _>>()?, sent })
    }

    /// Returns the problems in what was counted from here until `now`.
    pub(super) fn problems(
        &self,
        mut now: impl FnMut() -> anyhow::Result<Self>,
    ) -> anyhow::Result<Vec<String>> {
        let mut wrong = now()?.since(self);
        for _ in 1..ATTEMPTS {
            if wrong.is_empty() {
                break;
            }
            // A drive may update its log late.
            std::thread::sleep(DELAY);
            wrong = now()?.since(self);
        }
        Ok(wrong)
    }

    fn since(&self, before: &Self) -> Vec<String> {
        let sent_commands = self.sent.commands - before.sent.commands;
        let errors = self.sent.errors - before.sent.errors;
        let devices = self.devices.iter().zip(&before.devices);
        let (mut commands, mut moved) = (0_u64, [0_u64; 2]);
        for (now, then) in devices {
            for (way, moved) in moved.iter_mut().enumerate() {
                commands += now.commands[way].wrapping_sub(then.commands[way]);
                *moved += now.units[way].wrapping_sub(then.units[way]);
            }
        }
        let mut wrong = Vec::new();
        if errors > 0 {
            wrong.push(format!("{errors} commands failed"));
        }
        if self.devices.is_empty() {
            return wrong;
        }
        if commands != sent_commands {
            wrong.push(format!(
                "{sent_commands} commands were sent, and the devices' SMART logs count {commands}"
            ));
        }
        for (way, name) in ["read", "written"].into_iter().enumerate() {
            let sent = self.sent.bytes[way] - before.sent.bytes[way];
            let found = moved[way];
            // Each device rounds to a unit.
            let rounded = self.devices.len() as u64 * UNIT_BYTES;
            let discarded = [self.sent.discarded - before.sent.discarded, 0][way];
            let least = sent.saturating_sub(rounded + discarded);
            if !(least..=sent + rounded).contains(&found.saturating_mul(UNIT_BYTES)) {
                wrong.push(format!(
                    "{sent} bytes were {name}, and the SMART logs count {found} x 512,000"
                ));
            }
        }
        wrong
    }
}

/// Returns true if devices count what an executor moves: files do not, and the software controllers
/// in front of them do not see it.
pub(super) fn is_logged(executor: Executor, are_drives: bool) -> bool {
    executor != Executor::File || are_drives
}

/// Returns the counters of the devices and of the I/O kernel.
pub(super) fn counted(bench: &mut Bench) -> anyhow::Result<Counted> {
    let kernel = bench.stack.ring.counters()?.total;
    let sent = Sent {
        commands: kernel.commands,
        bytes: [kernel.bytes_read, kernel.bytes_written],
        discarded: 0,
        errors: kernel.errors,
    };
    let controllers = bench.stack.ring.controllers().filter(|_| bench.is_logged);
    Ok(Counted::read(controllers.map(|(controller, _)| controller), sent)?)
}

/// Checks a measurement that began at `before`. The transfers of the sample were the last ones.
pub(super) fn check(
    bench: &mut Bench,
    load: &Load,
    before: &Counted,
    sample: &[Sampled],
) -> anyhow::Result<Checks> {
    let wrong = before.problems(|| counted(bench))?;
    let mut checks = Checks { wrong, ..Checks::default() };
    if !bench.has_contents() {
        return Ok(checks);
    }
    for transfer in sample.iter().take(SAMPLE) {
        let on_device = read(bench, load, transfer)?;
        let wanted = match transfer.is_read {
            true => bench.contents(transfer.buffer, load.bytes)?,
            false => Some(bench.written(transfer.buffer, load.bytes)),
        };
        checks.compared += u64::from(load.bytes);
        checks.sampled += 1;
        checks.zeros += u64::from(on_device.iter().all(|byte| *byte == 0));
        if wanted.is_some_and(|wanted| wanted != on_device) {
            let what = if transfer.is_read { "was read" } else { "was written" };
            checks.wrong.push(format!(
                "device {}: place {} of {} bytes is not what {what}",
                transfer.device, transfer.place, load.bytes
            ));
        }
    }
    Ok(checks)
}

/// Reads the bytes of a transfer with the driver's own queue.
fn read(bench: &Bench, load: &Load, transfer: &Sampled) -> anyhow::Result<Vec<u8>> {
    let device = transfer.device as usize;
    let area = bench.areas[device];
    let lba = area.lba(transfer.place, load.bytes);
    let (controller, nsid) = bench.stack.ring.controllers().nth(device).expect("each has an area");
    let mut bytes = vec![0; load.bytes as usize];
    let controller: &mut Controller = &mut controller.lock();
    controller.read(nsid, Lba(lba), &mut bytes)?;
    Ok(bytes)
}
