//! The real driver on controllers driven by threads and by virtual time, on every medium.

use std::sync::Arc;

use nvme_driver::{Bus, Clock, Controller, ControllerOptions, Error, MonotonicClock, Nanos};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, EmuRunner, FaultAction, FaultPlan, FaultRule, FaultWhen, FileMedia,
    FileOptions, Latency, Media, MemoryMedia, SimClock, SimMedia, SimOptions,
};
use nvme_spec::{
    ids::{Lba, Nsid},
    nvm::NvmOpcode,
    status::Status,
};

const CAPACITY: u64 = 16 << 20;
const NSID: Nsid = Nsid(1);

fn emu(domain: &Arc<EmuDomain>, id: &str, media: impl Media + 'static) -> Arc<Emu> {
    Emu::new(domain.clone(), EmuConfig::new(id).namespace(media, 4096)).unwrap()
}

fn attach(emu: &Arc<Emu>, clock: &Arc<dyn Clock>) -> Controller {
    let bus: Arc<dyn Bus> = emu.bus();
    Controller::attach(bus, clock.clone(), ControllerOptions::default()).unwrap()
}

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|at| salt ^ u8::try_from((at / 7) % 251).unwrap()).collect()
}

/// Writes, reads back, and checks; the transfers exceed MDTS.
fn round_trip(controller: &mut Controller, salt: u8) {
    let bytes = pattern(1 << 20, salt);
    controller.write(NSID, Lba(3), &bytes, false).unwrap();
    controller.flush(NSID).unwrap();
    let mut back = vec![0; bytes.len()];
    controller.read(NSID, Lba(3), &mut back).unwrap();
    assert!(bytes == back, "what was read is not what was written");
}

#[test]
fn threads_drive_controllers_on_memory_and_on_files() {
    let domain = EmuDomain::new("test");
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("medium");
    let file = |direct| {
        let options = FileOptions { direct, depth: 32, ..FileOptions::default() };
        FileMedia::open(&path, CAPACITY, options)
    };
    let emus = vec![
        emu(&domain, "memory", MemoryMedia::new(CAPACITY).unwrap()),
        emu(&domain, "file", file(true).unwrap()),
    ];
    let runner = EmuRunner::spawn(emus.clone(), clock.clone()).unwrap();
    for (salt, emu) in (1u8..).zip(&emus) {
        let mut controller = attach(emu, &clock);
        round_trip(&mut controller, salt);
        controller.shutdown().unwrap();
        assert_eq!(emu.counters().refused_dma, 0);
    }
    drop(runner);
    drop(emus);
    // The written data is in the file, at the right offset.
    let mut found = vec![0u8; 1 << 20];
    let bytes = std::fs::read(&path).unwrap();
    found.copy_from_slice(&bytes[3 * 4096..3 * 4096 + (1 << 20)]);
    assert!(found == pattern(1 << 20, 2));
    assert_eq!(domain.mapped(), [], "everything was unmapped");
}

#[test]
fn virtual_time_drives_a_slow_medium_the_same_way_each_time() {
    let run = |seed: u64| {
        let sim = SimClock::new(seed);
        let clock: Arc<dyn Clock> = sim.clone();
        let domain = EmuDomain::new("sim");
        let options = SimOptions { seed, ..SimOptions::default() };
        let media = SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), options);
        let emu = emu(&domain, "sim0", media);
        sim.drive(emu.clone());
        let mut controller = attach(&emu, &clock);
        round_trip(&mut controller, 9);
        controller.shutdown().unwrap();
        (clock.now(), emu.counters())
    };
    let (seed, other) = (0x5EED, 0x0DD5);
    let (time, counters) = run(seed);
    assert!(time > Nanos(200_000), "latencies pass in virtual time: {time:?}");
    assert!(counters.writes >= 2 && counters.reads >= 2, "split at MDTS: {counters:?}");
    assert_eq!(run(seed), (time, counters), "seed {seed:#x} gave another run");
    assert_ne!(run(other).0, time);
}

#[test]
fn power_loss_takes_what_was_not_flushed_and_nothing_else() {
    let sim = SimClock::new(1);
    let clock: Arc<dyn Clock> = sim.clone();
    let domain = EmuDomain::new("sim");
    let store = MemoryMedia::new(CAPACITY).unwrap();
    let options = SimOptions { seed: 1, ..SimOptions::default() };
    let emu = emu(&domain, "sim0", SimMedia::new(store.clone(), options));
    sim.drive(emu.clone());
    let mut controller = attach(&emu, &clock);
    let safe = pattern(256 << 10, 1);
    controller.write(NSID, Lba(0), &safe, false).unwrap();
    controller.flush(NSID).unwrap();
    let risky = pattern(256 << 10, 2);
    controller.write(NSID, Lba(64), &risky, false).unwrap();
    emu.power_loss();
    drop(controller);

    let mut controller = attach(&emu, &clock);
    let mut back = vec![0; safe.len()];
    controller.read(NSID, Lba(0), &mut back).unwrap();
    assert!(safe == back, "flushed bytes were lost");
    controller.read(NSID, Lba(64), &mut back).unwrap();
    let (mut kept, mut lost) = (0, 0);
    for (found, wrote) in back.chunks(4096).zip(risky.chunks(4096)) {
        kept += u32::from(found == wrote);
        lost += u32::from(found.iter().all(|byte| *byte == 0));
    }
    assert_eq!(kept + lost, 64, "a block is neither old nor new");
    assert!(kept > 0 && lost > 0, "{kept} kept, {lost} lost");
}

#[test]
fn a_shutdown_waits_for_a_slow_flush() {
    let sim = SimClock::new(1);
    let slow = Latency { min_ns: 30_000_000_000, mean_ns: 30_000_000_000, ..Latency::default() };
    let options = SimOptions { flush: slow, ..SimOptions::default() };
    let media = SimMedia::new(MemoryMedia::new(CAPACITY).unwrap(), options);
    let emu = emu(&EmuDomain::new("sim"), "sim0", media);
    sim.drive(emu.clone());
    let clock: Arc<dyn Clock> = sim.clone();
    attach(&emu, &clock).shutdown().unwrap();
    assert!(sim.now() > Nanos::from_millis(30_000));
}

/// A device that fails to flush its cache may have dropped the data it could not write.
#[test]
fn a_flush_that_failed_is_not_sent_again() {
    let sim = SimClock::new(1);
    let clock: Arc<dyn Clock> = sim.clone();
    let emu = emu(&EmuDomain::new("test"), "emu0", MemoryMedia::new(CAPACITY).unwrap());
    sim.drive(emu.clone());
    let mut controller = attach(&emu, &clock);
    let mut done = |opcode: NvmOpcode| {
        // Write Fault with Do Not Retry clear.
        let (opcode_of, admin) = (Some(opcode.0), Some(false));
        let when = FaultWhen { opcode: opcode_of, admin, ..FaultWhen::default() };
        let then = FaultAction::Status { code: Status::WRITE_FAULT.0, dnr: false };
        let rules = vec![FaultRule::new(when, then).limit(1)];
        emu.set_faults(FaultPlan { rules, ..FaultPlan::default() });
        match opcode {
            NvmOpcode::FLUSH => controller.flush(NSID),
            _ => controller.write(NSID, Lba(0), &pattern(4096, 1), true),
        }
    };
    done(NvmOpcode::WRITE).unwrap();
    let error = done(NvmOpcode::FLUSH).unwrap_err();
    let Error::Command { status, .. } = error else { panic!("{error}") };
    assert_eq!(status.code(), Status::WRITE_FAULT);
    assert_eq!(emu.counters().flushes, 0);
    controller.flush(NSID).unwrap();
    assert_eq!(emu.counters().flushes, 1);
}

#[test]
fn resets_are_counted_without_the_controller() {
    let sim = SimClock::new(1);
    let clock: Arc<dyn Clock> = sim.clone();
    let emu = emu(&EmuDomain::new("test"), "emu0", MemoryMedia::new(CAPACITY).unwrap());
    sim.drive(emu.clone());
    let mut controller = attach(&emu, &clock);
    let resets = controller.resets().clone();
    assert_eq!(resets.get(), 0);
    controller.reset().unwrap();
    assert_eq!(resets.get(), 1);
    // A command on a queue lost to the power failure.
    emu.power_loss();
    controller.flush(NSID).unwrap_err();
    assert_eq!(resets.get(), 2);
}
