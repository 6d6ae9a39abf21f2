//! Drives that disappear while in use.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::thread;

use anyhow::{Context, Result, ensure};
use nvme_driver::{Bus, ControllerOptions, Error, FailCause, Nanos, State, TimeoutOutcome};
use nvme_spec::ids::Lba;

use crate::drive::{FIRST, alone, attach, bus, options, pattern, same, space};
use crate::hardware::{DRIVE_A, DRIVE_B, PORT};
use crate::host::Host;
use crate::pci;
use crate::runner::until;

/// Unbinding waits for the device's user. The bus reports the request; closing it is enough.
pub fn wanted_back_by_its_driver() -> Result<()> {
    let space = space()?;
    let bus_b = bus(&space, DRIVE_B)?;
    let mut drive = attach(&bus_b, options())?;
    drive.read(FIRST, Lba(0), &mut [0; 4096])?;
    ensure!(!bus_b.requested(), "wanted back before anybody asked");
    let unbind = thread::spawn(|| fs::write("/sys/bus/pci/drivers/vfio-pci/unbind", DRIVE_B));
    until("it is wanted back", || {
        drive.read(FIRST, Lba(0), &mut [0; 4096])?;
        Ok(bus_b.requested())
    })?;
    ensure!(!unbind.is_finished(), "the kernel took away a drive in use");
    drive.shutdown()?;
    drop((drive, bus_b));
    unbind.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))?.context("unbind")?;
    ensure!(pci::driver(DRIVE_B).is_none(), "it has {:?}", pci::driver(DRIVE_B));
    // Rebind it for the next tests.
    pci::give_to_vfio(&[DRIVE_B])
}

/// The port above the drive blocks all traffic, like a lost link, except that registers read as
/// zeroes here.
pub fn a_lost_link_ends_in_an_error() -> Result<()> {
    let options = ControllerOptions {
        command_timeout: Nanos::from_millis(2_000),
        admin_timeout: Nanos::from_millis(2_000),
        abort_grace: Nanos::from_millis(100),
        ..options()
    };
    let (_space, mut drive) = alone(DRIVE_A, options)?;
    let expected = pattern(600, 4096);
    drive.write(FIRST, Lba(80), &expected, true)?;
    let port = OpenOptions::new().read(true).write(true).open(pci::folder(PORT).join("config"))?;
    let (mut command, offset) = ([0; 2], 4);
    port.read_exact_at(&mut command, offset)?;
    port.write_all_at(&[0; 2], offset)?;
    let lost = drive.read(FIRST, Lba(80), &mut [0; 512]);
    let again = drive.read(FIRST, Lba(80), &mut [0; 512]);
    port.write_all_at(&command, offset)?;
    let Err(Error::Timeout { outcome: TimeoutOutcome::ControllerFailed, .. }) = lost else {
        anyhow::bail!("without a link a read ends with {lost:?}");
    };
    ensure!(matches!(again, Err(Error::Failed { .. })), "and then with {again:?}");
    ensure!(matches!(drive.state(), State::Failed(_)), "{:?}", drive.state());
    // The link is up again.
    drive.reset()?;
    let mut found = vec![0; expected.len()];
    drive.read(FIRST, Lba(80), &mut found)?;
    same("after the link came back", &found, &expected)
}

/// Pulls the drive (orderly: the slot asks first) while commands run.
pub fn a_pulled_drive() -> Result<()> {
    let space = space()?;
    let bus_a = bus(&space, DRIVE_A)?;
    let mut drive = attach(&bus_a, options())?;
    let mut host = Host::open()?;
    drive.read(FIRST, Lba(0), &mut [0; 4096])?;
    host.ask("qmp {\"execute\": \"device_del\", \"arguments\": {\"id\": \"nv0\"}}")?;
    let mut reads = 0;
    until("it is to be removed", || {
        drive.read(FIRST, Lba(reads % 1000), &mut [0; 4096])?;
        reads += 1;
        Ok(bus_a.requested())
    })?;
    // Everything works until the owner closes the drive.
    drive.read(FIRST, Lba(0), &mut [0; 4096])?;
    // From here on the driver treats it as absent, although it still responds: errors, no hang.
    bus_a.set_gone();
    let gone = drive.poll_events();
    ensure!(matches!(gone, Err(Error::Gone { .. })), "{gone:?}");
    let gone = drive.read(FIRST, Lba(0), &mut [0; 4096]);
    ensure!(matches!(gone, Err(Error::Failed { cause: FailCause::Gone, .. })), "{gone:?}");
    let gone = drive.reset();
    ensure!(matches!(gone, Err(Error::Gone { .. })), "{gone:?}");
    drop((drive, bus_a));
    // QEMU's event is unusable: QEMU never frees a drive that was once stopped in the middle of a
    // command, and sends the event only then.
    until("the drive is gone", || {
        let is_known = host.ask("qmp {\"execute\": \"query-pci\"}")?.contains("\"nv0\"");
        Ok(!is_known && !pci::folder(DRIVE_A).exists())
    })?;
    let error = bus(&space, DRIVE_A).err().context("a drive that was pulled can be opened")?;
    ensure!(error.to_string().contains(DRIVE_A), "{error}");
    // The other drive is not affected.
    let mut other = attach(&bus(&space, DRIVE_B)?, options())?;
    Ok(other.read(FIRST, Lba(0), &mut [0; 4096])?)
}
