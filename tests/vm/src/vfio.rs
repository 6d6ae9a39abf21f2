//! The driver through VFIO: its information on the drives, and data in all descriptor formats. The
//! host, which sees the files behind the drives, checks where bytes went.

mod data;
mod queues;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use nvme_driver::platform::vfio::VfioSpace;
use nvme_driver::{Bus, Controller, ControllerEvent, State, WaitMode};
use nvme_spec::{ids::Lba, reg};

use crate::drive::{self, FIRST, SECOND, alone, attach, bus, options, pattern, same, space};
use crate::hardware::{DRIVE_A, DRIVE_B, FILE_A, FILE_B, SERIAL_A, SERIAL_B};
use crate::host::{self, Host};
use crate::runner::{SECONDS_MAX, Suite, tests, until};

use data::{
    copies_of_all_sizes, odd_bytes_in_one_block, odd_bytes_in_one_segment, pages_everywhere,
    prp_refuses_what_it_cannot_say, segments_in_a_chain, splits_at_mdts, zeroes_without_data,
};
use queues::{
    a_queue_goes_round, a_wrong_doorbell_is_reported, commands_in_flight_are_recovered,
    many_commands_for_one_doorbell, queues_of_many_depths,
};

pub const SUITE: Suite = Suite {
    name: "vfio",
    seconds_max: SECONDS_MAX,
    tests: tests![
        the_drives_say_what_they_are,
        copies_of_all_sizes,
        pages_everywhere,
        prp_refuses_what_it_cannot_say,
        odd_bytes_in_one_block,
        odd_bytes_in_one_segment,
        segments_in_a_chain,
        splits_at_mdts,
        zeroes_without_data,
        namespaces_do_not_mix,
        interrupts_end_the_waits,
        many_commands_for_one_doorbell,
        a_queue_goes_round,
        queues_of_many_depths,
        a_wrong_doorbell_is_reported,
        commands_in_flight_are_recovered,
        from_drive_to_drive_through_one_memory,
        a_reset_keeps_the_data,
        a_function_reset_leaves_bus_memory_and_interrupts,
        again_and_again,
    ],
};

fn the_drives_say_what_they_are() -> Result<()> {
    let space = space()?;
    let (a, b) = (bus(&space, DRIVE_A)?, bus(&space, DRIVE_B)?);
    let (a, b) = (attach(&a, options())?, attach(&b, options())?);
    for (drive, serial) in [(&a, SERIAL_A), (&b, SERIAL_B)] {
        let info = drive.info();
        ensure!(info.serial == serial && info.model.contains("QEMU"), "{info:?}");
        ensure!(info.mdts_bytes == Some(512 << 10), "MDTS is {:?}", info.mdts_bytes);
        ensure!(drive.refused_namespaces().is_empty(), "{:?}", drive.refused_namespaces());
    }
    let sizes = |drive: &Controller| -> Vec<(u32, u64, u64)> {
        let spaces = drive.namespaces().iter();
        spaces.map(|space| (space.nsid.0, space.lba_bytes(), space.bytes())).collect()
    };
    ensure!(sizes(&a) == [(1, 512, 256 << 20)], "{:?}", sizes(&a));
    ensure!(sizes(&b) == [(1, 4096, 128 << 20), (2, 512, 64 << 20)], "{:?}", sizes(&b));
    Ok(())
}

fn namespaces_do_not_mix() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_B, options())?;
    let mut host = Host::open()?;
    let (first, second) = (pattern(1, 64 << 10), pattern(2, 64 << 10));
    drive.write(FIRST, Lba(16), &first, true)?;
    drive.write(SECOND, Lba(128), &second, true)?;
    for (file, expected) in [(FILE_B[0], &first), (FILE_B[1], &second)] {
        let found = host.hash(file, 64 << 10, expected.len())?;
        ensure!(found == host::hash(expected), "{file} has something else");
    }
    let mut found = vec![0; 64 << 10];
    drive.read(FIRST, Lba(16), &mut found)?;
    same("namespace 1", &found, &first)?;
    drive.read(SECOND, Lba(128), &mut found)?;
    same("namespace 2", &found, &second)?;
    // The last LBA of each, and one too far, which is not sent.
    for space in drive.namespaces().to_vec() {
        let mut block = vec![0; space.lba_bytes() as usize];
        drive.read(space.nsid, Lba(space.lbas - 1), &mut block)?;
        let beyond = drive.read(space.nsid, Lba(space.lbas), &mut block);
        ensure!(beyond.is_err(), "an LBA behind the end of namespace {}", space.nsid);
        block.pop();
        ensure!(drive.read(space.nsid, Lba(0), &mut block).is_err(), "a part of an LBA");
    }
    Ok(())
}

/// Both vectors fire, the data is right, and no wait fell back to polling.
fn interrupts_end_the_waits() -> Result<()> {
    const READS: u64 = 40;
    let wait = WaitMode::Interrupt;
    let (_space, mut drive) = alone(DRIVE_B, nvme_driver::ControllerOptions { wait, ..options() })?;
    let (before, expected) = (interrupts(DRIVE_B)?, pattern(3, 4096));
    ensure!(!before.is_empty(), "the kernel knows of no vector of {DRIVE_B}");
    drive.write(FIRST, Lba(7), &expected, true)?;
    for _ in 0..READS {
        let mut found = vec![0; 4096];
        drive.read(FIRST, Lba(7), &mut found)?;
        same("by interrupt", &found, &expected)?;
    }
    drive.smart_log()?;
    // The driver also polls the queue, so on a busy machine the last interrupt may come after the
    // completion was seen.
    let since = || -> Result<Vec<u64>> {
        let after = interrupts(DRIVE_B)?;
        Ok(after.iter().zip(&before).map(|(after, before)| after - before).collect())
    };
    let mut fired = since()?;
    until("the interrupts come", || {
        fired = since()?;
        Ok(fired.first() >= Some(&1) && fired.get(1) > Some(&READS))
    })?;
    ensure!(fired.first() >= Some(&1), "vector 0 did not fire for an admin command: {fired:?}");
    let io = fired.get(1).copied().unwrap_or(0);
    ensure!(io > READS, "vector 1 fired {io} times for {READS} reads and a write");
    Ok(())
}

/// Returns the kernel's interrupt count of each vector of a function.
fn interrupts(bdf: &str) -> Result<Vec<u64>> {
    let table = std::fs::read_to_string("/proc/interrupts").context("/proc/interrupts")?;
    let lines = table.lines().filter(|line| line.contains("vfio-msix") && line.contains(bdf));
    // `41:  0  17  IR-PCI-MSIX-...  0-edge  vfio-msix[0](0000:00:03.0)`: a count for each CPU.
    let count = |line: &str| {
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
    };
    Ok(lines.map(count).collect())
}

/// Memory is mapped once, and two drives use it at the same address.
fn from_drive_to_drive_through_one_memory() -> Result<()> {
    let space = space()?;
    let (bus_a, bus_b) = (bus(&space, DRIVE_A)?, bus(&space, DRIVE_B)?);
    let (mut a, mut b) = (attach(&bus_a, options())?, attach(&bus_b, options())?);
    let expected = pattern(4, 1 << 20);
    a.write(FIRST, Lba(2048), &expected, true)?;
    let memory = drive::memory(&*bus_a, 1 << 20)?;
    a.read_dma(FIRST, Lba(2048), std::slice::from_ref(&memory))?;
    b.write_dma(FIRST, Lba(512), std::slice::from_ref(&memory), true)?;
    let mut host = Host::open()?;
    for (file, offset) in [(FILE_A, 2048 * 512), (FILE_B[0], 512 * 4096)] {
        let found = host.hash(file, offset, expected.len())?;
        ensure!(found == host::hash(&expected), "{file} has something else");
    }
    Ok(())
}

fn a_reset_keeps_the_data() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let expected = pattern(5, 8192);
    drive.write(FIRST, Lba(64), &expected, true)?;
    for _ in 0..3 {
        drive.reset()?;
        ensure!(drive.state() == State::Ready, "{:?}", drive.state());
        let mut found = vec![0; expected.len()];
        drive.read(FIRST, Lba(64), &mut found)?;
        same("after a reset", &found, &expected)?;
    }
    Ok(())
}

/// The kernel resets the function. The interrupt pin stays disabled before and after it.
fn a_function_reset_leaves_bus_memory_and_interrupts() -> Result<()> {
    let wait = WaitMode::Interrupt;
    let (_space, mut drive) = alone(DRIVE_A, nvme_driver::ControllerOptions { wait, ..options() })?;
    ensure!(has_no_intx(DRIVE_A)?, "the drive may assert its interrupt pin");
    let expected = pattern(6, 8192);
    drive.write(FIRST, Lba(96), &expected, true)?;
    let bus = dyn_bus(&drive);
    for _ in 0..3 {
        bus.reset()?;
        for register in [reg::CC, reg::CSTS] {
            let value = bus.read32(register)?;
            ensure!(value == 0, "register {register:#x} is {value:#x} after a reset");
        }
        ensure!(has_no_intx(DRIVE_A)?, "the drive may assert its interrupt pin after a reset");
        drive.reset()?;
        let before = interrupts(DRIVE_A)?;
        let mut found = vec![0; expected.len()];
        drive.read(FIRST, Lba(96), &mut found)?;
        same("after a reset of the function", &found, &expected)?;
        ensure!(interrupts(DRIVE_A)?.get(1) > before.get(1), "no interrupt after a reset");
    }
    Ok(())
}

/// Returns bit 10 of the command register, as the function itself has it.
fn has_no_intx(bdf: &str) -> Result<bool> {
    let config = std::fs::read(crate::pci::folder(bdf).join("config"))?;
    Ok(config.get(5).is_some_and(|command| command & 1 << 2 != 0))
}

/// Nothing stays mapped, open or claimed after everything is dropped.
fn again_and_again() -> Result<()> {
    let space = space()?;
    for round in 0..6 {
        let bus_a = bus(&space, DRIVE_A)?;
        let mut drive = attach(&bus_a, options())?;
        let expected = pattern(round, 4096);
        drive.write(FIRST, Lba(8), &expected, false)?;
        // With and without a shutdown of the drive.
        if round % 2 == 0 {
            drive.shutdown()?;
        }
        drop((drive, bus_a));
        nothing_is_left(&space)?;
        let mut found = vec![0; 4096];
        let bus_a = bus(&space, DRIVE_A)?;
        attach(&bus_a, options())?.read(FIRST, Lba(8), &mut found)?;
        same("after another attach", &found, &expected)?;
    }
    Ok(())
}

fn nothing_is_left(space: &Arc<VfioSpace>) -> Result<()> {
    let status = space.status();
    ensure!(status.mappings == 0 && status.groups == 0, "left behind: {status:?}");
    Ok(())
}

/// Returns true if the drive has reported an asynchronous error.
fn reported(drive: &mut Controller) -> Result<bool> {
    let events = drive.poll_events()?;
    Ok(events.iter().any(|event| matches!(event, ControllerEvent::Error { .. })))
}

fn dyn_bus(drive: &Controller) -> Arc<dyn Bus> {
    Arc::clone(drive.bus())
}
