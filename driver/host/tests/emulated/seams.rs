//! Clock, DMA slices and threads.

use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, DmaError, DmaSlice, DmaSpace, MonotonicClock, Nanos,
    WaitMode,
};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, FaultPlan, MemoryMedia, RegisterFaults};
use nvme_spec::{
    ids::{Lba, Nsid},
    reg::{self, Csts},
};
use std::sync::Arc;

use crate::{LBA, LBAS, Rig, bytes, fill, pattern};

#[test]
fn slices_stay_inside_and_agree_with_their_mapping() {
    let rig = Rig::good();
    let whole = rig.alloc(8192);
    let memory = whole.memory().clone();
    assert_eq!(whole.len(), 8192);
    let part = whole.slice(4000, 200).unwrap();
    assert_eq!(part.iova().0, whole.iova().0 + 4000);
    assert_eq!(part.host().unwrap().as_ptr().addr(), whole.host().unwrap().as_ptr().addr() + 4000);
    assert_eq!(part.place().iova, part.iova());
    fill(&part, &pattern(200, 1));
    assert!(bytes(&whole)[4000..4200] == pattern(200, 1));
    assert!(whole.slice(8192, 0).unwrap().is_empty());
    for (offset, len) in [(8192, 1), (0, 8193), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(matches!(whole.slice(offset, len), Err(DmaError::OutOfRange { .. })));
        let made = DmaSlice::new(memory.clone(), offset, len);
        assert!(matches!(made, Err(DmaError::OutOfRange { .. })));
    }
    assert!(part.slice(100, 101).is_err(), "a part of a part ends with the part");
}

#[test]
fn nanos_do_not_overflow() {
    assert_eq!(Nanos::MAX + Nanos(1), Nanos::MAX);
    assert_eq!(Nanos(1) - Nanos(2), Nanos(0));
    assert_eq!(Nanos::from_millis(u64::MAX), Nanos::MAX);
}

#[test]
fn the_monotonic_clock_pauses_no_longer_than_asked() {
    let clock = MonotonicClock::default();
    let until = clock.now() + Nanos::from_millis(2);
    for idle in 0.. {
        if clock.now() >= until {
            break;
        }
        let before = clock.now();
        clock.pause(idle, until);
        assert!(clock.now() >= before);
    }
    assert!(clock.now() - until < Nanos::from_millis(1_000));
}

#[test]
fn threads_in_real_time() {
    fn is_send<T: Send>(_: &T) {}
    for wait in [WaitMode::Poll, WaitMode::Interrupt] {
        let domain = EmuDomain::new("threads");
        let media = MemoryMedia::new(LBAS * LBA as u64).unwrap();
        let config = EmuConfig::new("emu0").namespace(media, LBA as u32);
        let emu = Emu::new(domain.clone(), config).unwrap();
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let runner = EmuRunner::spawn(vec![emu.clone()], clock.clone()).unwrap();
        let options = ControllerOptions { wait, ..Default::default() };
        let mut ctrl = Controller::attach(emu.bus(), clock, options).unwrap();
        is_send(&ctrl);
        let data = pattern(3000 * LBA, 4);
        let mut back = vec![0; data.len()];
        for _ in 0..5 {
            ctrl.write(Nsid(1), Lba(11), &data, false).unwrap();
            ctrl.read(Nsid(1), Lba(11), &mut back).unwrap();
            assert!(back == data, "{wait:?}");
            back.fill(0);
        }
        ctrl.shutdown().unwrap();
        drop(ctrl);
        assert!(domain.mapped().is_empty(), "everything is unmapped");
        assert_eq!(domain.refused(), 0, "and nothing else was ever accessed");
        drop(runner);
    }
}

#[test]
fn two_controllers_share_an_address_space() {
    let domain = EmuDomain::new("shared");
    let clock = nvme_emu::SimClock::new(1);
    let attach = |id: &str| {
        let media = MemoryMedia::new(LBAS * LBA as u64).unwrap();
        let config = EmuConfig::new(id).namespace(media, LBA as u32);
        let emu = Emu::new(domain.clone(), config).unwrap();
        clock.drive(emu.clone());
        Controller::attach(emu.bus(), clock.clone(), ControllerOptions::default()).unwrap()
    };
    let (mut one, mut two) = (attach("one"), attach("two"));
    let slice = DmaSlice::whole(domain.alloc(64 << 10).unwrap()).unwrap();
    let data = pattern(slice.len(), 8);
    one.write(Nsid(1), Lba(0), &data, false).unwrap();
    // From one drive to the other through memory that was mapped once.
    one.read_dma(Nsid(1), Lba(0), std::slice::from_ref(&slice)).unwrap();
    two.write_dma(Nsid(1), Lba(0), std::slice::from_ref(&slice), true).unwrap();
    let mut back = vec![0; data.len()];
    two.read(Nsid(1), Lba(0), &mut back).unwrap();
    assert!(back == data);
}

/// A function reset returns the registers to power-on values, even when clearing CC.EN does not.
#[test]
fn a_function_reset_works_where_clearing_cc_en_does_not() {
    let rig = Rig::good();
    let bus: Arc<dyn Bus> = rig.emu.bus();
    let ctrl = rig.attach();
    let registers = RegisterFaults { rdy_never_clears: true, ..RegisterFaults::default() };
    rig.emu.set_faults(FaultPlan { registers, ..FaultPlan::default() });
    std::mem::forget(ctrl);
    bus.write32(reg::CC, 0).unwrap();
    rig.clock.pause(0, rig.clock.now() + Nanos::from_millis(60_000));
    assert_eq!(Csts(bus.read32(reg::CSTS).unwrap()).rdy(), 1, "stuck");
    bus.reset().unwrap();
    assert_eq!(Csts(bus.read32(reg::CSTS).unwrap()), Csts(0));
    for register in [reg::CC, reg::AQA, reg::ASQ, reg::ACQ] {
        assert_eq!(bus.read32(register).unwrap(), 0, "{register:#x}");
    }
    rig.attach().read(Nsid(1), Lba(0), &mut [0; LBA]).unwrap();
}

/// The inode identifies the shared mapping: another thread may map the same addresses as soon as
/// they are free.
#[test]
fn doorbells_stay_mapped_as_long_as_somebody_has_them() {
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    let page = Rig::good().emu.bus().doorbells();
    let start = format!("{:x}-", page.host().as_ptr().addr());
    let inode = |line: &str| line.split_whitespace().nth(4).unwrap().to_owned();
    let mapping = maps().lines().find(|line| line.starts_with(&start)).map(inode);
    let mapping = mapping.expect("the bus is gone, not the page");
    assert_ne!(mapping, "0", "a shared mapping has an inode");
    drop(page);
    assert!(!maps().lines().any(|line| inode(line) == mapping));
}
