//! Devices with volatile caches that outlive the stores on them, in virtual time.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use nvme_driver::{Controller, ControllerOptions};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, MemoryMedia, SimClock, SimMedia,
    SimOptions,
};
use objstore::{
    Format, KvShape, Namespace, Store, StoreConfig, StoreDevice, StoreError, StoreOptions,
};
use ripieno_testkit::{Drives, KvMemory, format, inline_executor};

use crate::stack::{Stack, on};

pub const FLUSH: u8 = 0;
/// Write Fault with "do not retry" set.
pub const FLUSH_FAULT: FaultAction = FaultAction::Status { code: 0x280, dnr: true };

pub struct Shelf {
    pub bytes: Vec<MemoryMedia>,
    pub format: Format,
}

/// Devices that are powered up.
pub struct Powered {
    pub devices: Vec<StoreDevice>,
    pub domain: Arc<EmuDomain>,
    pub emus: Vec<Arc<Emu>>,
    pub clock: Arc<SimClock>,
}

impl Shelf {
    pub fn new(devices: usize, shape: KvShape) -> Self {
        let medium = |_| MemoryMedia::new(64 << 20).unwrap();
        Self { bytes: (0..devices).map(medium).collect(), format: format(shape) }
    }

    /// Formats the devices and opens the store on them.
    pub fn made(devices: usize, shape: KvShape, options: &StoreOptions) -> (Self, Stack) {
        let shelf = Self::new(devices, shape);
        shelf.make();
        let stack = shelf.open(options);
        (shelf, stack)
    }

    pub fn make(&self) {
        Store::format(&self.power_on().devices, &self.format).unwrap();
    }

    pub fn power_on(&self) -> Powered {
        let clock = SimClock::new(1);
        let config = |(at, bytes): (usize, &MemoryMedia)| {
            let options = SimOptions { seed: 1 + at as u64, ..SimOptions::default() };
            let media = SimMedia::new(bytes.clone(), options);
            EmuConfig::new(format!("drive{at}")).namespace(media, 4096)
        };
        let configs = self.bytes.iter().enumerate().map(config).collect();
        let Drives { domain, emus, .. } =
            Drives::simulated(EmuDomain::new("shelf"), configs, &clock);
        let attach = |emu: &Arc<Emu>| {
            Controller::attach(emu.bus(), clock.clone(), ControllerOptions::default()).unwrap()
        };
        let devices = emus.iter().map(attach).map(StoreDevice::new).collect();
        Powered { devices, domain, emus, clock }
    }

    pub fn open(&self, options: &StoreOptions) -> Stack {
        let Powered { devices, domain, emus, clock } = self.power_on();
        let shape = self.format.shape;
        let kv = KvMemory::new(&*domain, shape, 64);
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor: inline_executor(clock.clone()),
            shape,
            namespace: Namespace::default(),
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions { virtual_time: true, ..options.clone() },
        })
        .unwrap();
        Stack { store, shape, kv, domain, emus, clock }
    }
}

/// Cuts the power of all devices: what they have not flushed may be gone.
pub fn crash(stack: Stack) {
    stack.emus.iter().for_each(|emu| emu.power_loss());
}

/// Injects a fault into one device from now on.
pub fn break_device(emu: &Emu, rule: FaultRule) {
    emu.set_faults(FaultPlan { rules: vec![rule], ..FaultPlan::default() });
}

/// Fails the device's next Flush; the one after it would succeed.
pub fn break_flush(emu: &Emu) {
    break_device(emu, on(FLUSH, FLUSH_FAULT).limit(1));
}

/// Returns the number of flushes that each device has done.
pub fn flushes(emus: &[Arc<Emu>]) -> Vec<u64> {
    emus.iter().map(|emu| emu.counters().flushes).collect()
}

#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, StoreError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, StoreError::JournalFailed { .. }), "{error}");
    error.to_string()
}
