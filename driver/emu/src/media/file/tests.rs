//! A hanging disk: a pipe acts as the file, and a read waits until the pipe is written.

use std::{
    io::{PipeWriter, Write, pipe},
    time::{Duration, Instant},
};

use nvme_driver::{Clock, Controller, ControllerOptions, DmaSpace, Error, State, TimeoutOutcome};
use nvme_spec::ids::{Lba, Nsid};

use super::*;
use crate::{Emu, EmuConfig, EmuDomain, SimClock, media::DataFault};

const BLOCK: usize = 4096;
/// Time after which a wait is a hang, on any machine.
const WATCHDOG: Duration = Duration::from_secs(600);

fn hanging() -> (FileMedia, PipeWriter) {
    let (reader, writer) = pipe().unwrap();
    let limits = Limits { memory_align: 1, offset_align: 1 };
    let options = FileOptions { depth: 4, ..FileOptions::default() };
    let media = {
        let file = Arc::new(OwnedFd::from(reader));
        FileMedia::over(file, "pipe".as_ref(), 64 << 20, limits, options)
    };
    (media.unwrap(), writer)
}

/// Returns a medium with a read in the kernel.
fn reading() -> (FileMedia, PipeWriter) {
    let (mut media, writer) = hanging();
    read(&mut media);
    (media, writer)
}

/// Begins a read.
fn read(media: &mut FileMedia) {
    begin(media, MediaKind::Read, BLOCK);
    media.poll(Nanos(0), &mut Vec::new());
}

fn begin(media: &mut FileMedia, kind: MediaKind, len: usize) {
    let domain = EmuDomain::new("test");
    let memory = domain.alloc(len).unwrap();
    let mut sg_list = SgList::new();
    domain.access().push(&mut sg_list, memory.segments()[0].iova, len).unwrap();
    let (len, fault) = (len as u64, DataFault::None);
    let op = MediaOp { token: 1, kind, offset: 0, len, sg_list, placement: 0, fault };
    assert!(media.submit(op, Nanos(0)).is_none());
}

#[test]
fn few_bytes_are_read_at_a_time_and_writes_do_not_wait() {
    const LEN: usize = READS_MAX as usize / 2;
    let (mut media, mut writer) = hanging();
    (0..3).for_each(|_| begin(&mut media, MediaKind::Read, LEN));
    begin(&mut media, MediaKind::Flush, BLOCK);
    assert_eq!((media.flying(), media.in_flight()), (3, 4), "a read is queued");
    let other = std::thread::spawn(move || writer.write_all(&vec![7; 3 * LEN]));
    let mut done = Vec::new();
    while media.in_flight() > 0 {
        media.poll(Nanos(0), &mut done);
        assert!(media.lanes[0].bytes <= READS_MAX);
    }
    other.join().unwrap().unwrap();
    // A pipe cannot be flushed, but it was asked.
    assert_eq!(done.iter().filter(|each| each.result.is_ok()).count(), 3, "{done:?}");
    assert_eq!((done.len(), media.lanes[0].bytes), (4, 0));
}

#[test]
fn a_flush_does_not_wait_for_all_reads() {
    let (mut media, mut writer) = hanging();
    (0..8).for_each(|_| begin(&mut media, MediaKind::Read, BLOCK));
    begin(&mut media, MediaKind::Flush, BLOCK);
    writer.write_all(&[7; BLOCK]).unwrap();
    // A flush that waits for all reads ends never.
    let (mut done, since) = (Vec::new(), Instant::now());
    while done.len() < 2 {
        media.poll(Nanos(0), &mut done);
        assert!(since.elapsed() < WATCHDOG, "the slot of the read that ended is the flush's");
    }
    writer.write_all(&[7; 7 * BLOCK]).unwrap();
    while media.in_flight() > 0 {
        media.poll(Nanos(0), &mut done);
    }
}

#[test]
fn what_the_kernel_works_on_is_in_flight_after_a_cancel() {
    let (mut media, mut writer) = reading();
    media.cancel();
    let mut done = Vec::new();
    media.poll(Nanos(0), &mut done);
    assert_eq!(media.in_flight(), 1, "the kernel still writes into the memory");
    writer.write_all(&[7; BLOCK]).unwrap();
    while media.in_flight() > 0 {
        media.poll(Nanos(0), &mut done);
    }
    assert!(done.is_empty(), "a cancelled operation came back: {done:?}");
}

#[test]
fn a_medium_that_is_dropped_does_not_wait_for_ever() {
    let (media, writer) = reading();
    drop(media);
    drop(writer);
}

/// A thread claims the medium, begins a read and releases the medium; the result arrives in the
/// meantime.
#[test]
fn a_medium_passes_from_thread_to_thread_with_what_is_in_flight() {
    let (mut media, mut writer) = hanging();
    for round in 0..2u8 {
        let worker = std::thread::spawn(move || {
            media.set_exclusive(true);
            read(&mut media);
            let last = std::thread::spawn(move || {
                writer.write_all(&[round; BLOCK]).unwrap();
                writer
            });
            media.set_exclusive(false);
            (media, last.join().unwrap())
        });
        (media, writer) = worker.join().unwrap();
        let (clock, mut done) = (MonotonicClock::default(), Vec::new());
        wait_until(&clock, Nanos(WATCHDOG.as_nanos() as u64), || {
            media.poll(Nanos(0), &mut done);
            !done.is_empty()
        });
        assert_eq!(done.len(), 1, "the result is lost");
        assert!(done[0].result.is_ok(), "{done:?}");
    }
}

/// Command timeout, Abort, queue deletion, reset: all end at their deadlines, in virtual time, and
/// the controller can be reset once the disk is back.
#[test]
fn a_reset_ends_at_its_deadline_and_works_when_the_disk_is_back() {
    let (media, mut writer) = hanging();
    let clock = SimClock::new(1);
    let config = EmuConfig::new("emu0").namespace(media, BLOCK as u32);
    let emu = Emu::new(EmuDomain::new("test"), config).unwrap();
    clock.drive(emu.clone());
    let options = ControllerOptions::default();
    let mut controller = Controller::attach(emu.bus(), clock.clone(), options).unwrap();
    let mut block = [0; BLOCK];
    let error = controller.read(Nsid(1), Lba(0), &mut block).unwrap_err();
    let failed = TimeoutOutcome::ControllerFailed;
    assert!(matches!(error, Error::Timeout { outcome, .. } if outcome == failed), "{error}");
    assert!(matches!(controller.state(), State::Failed(_)));
    assert!(clock.now() < Nanos::from_millis(300_000), "{:?}", clock.now());

    // The first block completes the cancelled read.
    writer.write_all(&[7; 2 * BLOCK]).unwrap();
    controller.reset().unwrap();
    controller.read(Nsid(1), Lba(0), &mut block).unwrap();
    assert_eq!(block, [7; BLOCK]);
}
