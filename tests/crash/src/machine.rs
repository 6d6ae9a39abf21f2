//! Devices whose bytes survive power cuts and processes, their faults, and virtual time.

use std::{
    fmt,
    panic::resume_unwind,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;
use nvme_driver::{Clock, Controller, ControllerOptions, IovaRange, Nanos};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, Latency, MemoryMedia, PowerSwitch, SimClock, SimFaultKind,
    SimFaultLog, SimFaults, SimMedia, SimOptions,
};
use objstore::StoreDevice;
use rand::{Rng as _, rngs::SmallRng};
use ripieno_testkit::Drives;
use serde::{Deserialize, Serialize};

/// Bytes of a device.
const BYTES: u64 = 4 << 20;

/// Counts of faults that happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    pub failed_reads: u64,
    pub failed_writes: u64,
    pub failed_flushes: u64,
    /// Power losses of a single device while its process continues.
    pub blackouts: u64,
    /// Bits flipped in a process's memory.
    pub memory: u64,
    /// Lost or misdirected writes, and bit rot.
    pub lies: u64,
    /// Blocks torn by a power loss.
    pub torn: u64,
}

impl Faults {
    pub fn merge(&mut self, other: Self) {
        self.failed_reads += other.failed_reads;
        self.failed_writes += other.failed_writes;
        self.failed_flushes += other.failed_flushes;
        self.blackouts += other.blackouts;
        self.memory += other.memory;
        self.lies += other.lies;
        self.torn += other.torn;
    }

    /// Returns true if an operation may have failed.
    pub fn any(&self) -> bool {
        let failed = self.failed_reads + self.failed_writes + self.failed_flushes;
        failed + self.blackouts + self.memory > 0
    }

    fn count(&mut self, kind: SimFaultKind) {
        *match kind {
            SimFaultKind::FailedRead => &mut self.failed_reads,
            SimFaultKind::FailedWrite => &mut self.failed_writes,
            SimFaultKind::FailedFlush => &mut self.failed_flushes,
            SimFaultKind::Torn => &mut self.torn,
            _ => &mut self.lies,
        } += 1;
    }
}

/// Draws the faults of a life's devices: fewer per operation in a long life.
pub fn ills(rng: &mut SmallRng, lies: bool, is_long: bool) -> SimFaults {
    let torn = SimFaults { tear_bytes: Some(512), ..SimFaults::default() };
    if lies {
        return SimFaults {
            lost_write_ppm: 2_000,
            misdirected_write_ppm: 2_000,
            rot_ppm: 2_000,
            ..torn
        };
    }
    let (mut faults, kind) = (torn, rng.random_range(0..12));
    let part = if is_long { 40 } else { 1 };
    if [0, 3].contains(&kind) {
        faults.failed_flush_ppm = 40_000 / part;
    }
    if [1, 3].contains(&kind) {
        faults.failed_write_ppm = 6_000 / part;
    }
    if [2, 3].contains(&kind) {
        faults.failed_read_ppm = 6_000 / part;
    }
    faults
}

/// Devices without power: only their bytes.
pub struct Machine {
    pub lba_bytes: u32,
    pub bytes: Vec<MemoryMedia>,
}

/// Devices with power.
pub struct Powered {
    pub domain: Arc<EmuDomain>,
    pub emus: Vec<Arc<Emu>>,
    pub clock: Arc<Turns>,
    pub power: PowerSwitch,
    logs: Vec<SimFaultLog>,
    faults: Faults,
}

impl Machine {
    pub fn new(devices: usize, lba_bytes: u32) -> Self {
        let medium = || MemoryMedia::new(BYTES).expect("address space for the media");
        Self { lba_bytes, bytes: (0..devices).map(|_| medium()).collect() }
    }

    /// Powers the devices on, with the virtual time of `clock`.
    pub fn power_on(
        &self,
        name: &str,
        seed: u64,
        faults: SimFaults,
        clock: &Arc<Turns>,
    ) -> Powered {
        let (power, mut logs) = (PowerSwitch::default(), Vec::new());
        let quick = Latency { min_ns: 1_000, mean_ns: 2_000, ..Latency::default() };
        let mut config = |(at, bytes): (usize, &MemoryMedia)| {
            let options = SimOptions {
                seed: seed ^ (at as u64) << 32,
                read: quick,
                write: quick,
                flush: quick,
                volatile_cache: true,
                lba_bytes: self.lba_bytes,
                faults,
            };
            let media = SimMedia::new(bytes.clone(), options);
            logs.push(media.fault_log());
            let config = EmuConfig::new(format!("{name}{at}")).namespace(media, self.lba_bytes);
            EmuConfig { power: Some(power.clone()), ..config }
        };
        let configs = self.bytes.iter().enumerate().map(&mut config).collect();
        let Drives { domain, emus, .. } =
            Drives::simulated(EmuDomain::new(name), configs, &clock.sim);
        Powered { domain, emus, clock: clock.clone(), power, logs, faults: Faults::default() }
    }
}

impl Powered {
    /// Attaches the driver for a process.
    pub fn attach(&self) -> Result<Vec<StoreDevice>> {
        let options = ControllerOptions {
            command_timeout: Nanos::from_millis(50),
            admin_timeout: Nanos::from_millis(50),
            abort_grace: Nanos::from_millis(5),
            // Little memory, because a controller that is gone leaks its own.
            host_depth: 4,
            bounce_bytes: 32 << 10,
            // A process may end without a shutdown of its devices.
            shutdown_on_drop: false,
            ..ControllerOptions::default()
        };
        let attach = |emu: &Arc<Emu>| {
            let attached = Controller::attach(emu.bus(), self.clock.clone(), options.clone());
            Ok(StoreDevice::new(attached?))
        };
        self.emus.iter().map(attach).collect()
    }

    /// Returns the faults since power-on.
    pub fn faults(&mut self) -> Faults {
        for fault in self.logs.iter().flat_map(SimFaultLog::take) {
            self.faults.count(fault.kind);
        }
        self.faults
    }

    /// Makes a device lose its power for a moment.
    pub fn blackout(&mut self, device: usize) {
        self.emus[device].power_loss();
        self.faults.blackouts += 1;
    }

    /// Flips a bit in the only mapping of `bytes` bytes, if there is exactly one. Not during a
    /// device's read: no checksum covers the bus.
    pub fn rot_memory(&mut self, bytes: u64, rng: &mut SmallRng) {
        self.clock.sim.run_for(Nanos::from_millis(1));
        let mapped = self.domain.mapped().into_iter();
        let fits = |range: &IovaRange| range.len == bytes.next_multiple_of(4096);
        let found: Vec<IovaRange> = mapped.filter(fits).collect();
        let [range] = found.as_slice() else { return };
        let (iova, mut byte) = (range.iova.offset(rng.random_range(0..bytes)), [0]);
        let memory = self.domain.access();
        memory.read(iova, &mut byte).expect("it is mapped");
        memory.write(iova, &[byte[0] ^ 1 << rng.random_range(0..8)]).expect("it is mapped");
        drop(memory);
        self.faults.memory += 1;
    }

    /// Resets the devices, as the operating system does after a process ends.
    pub fn reset(&self) {
        for emu in &self.emus {
            emu.reset_function();
        }
    }

    /// Cuts the power of all devices: unflushed data may be lost.
    pub fn cut(&self) {
        self.power.cut();
        for emu in &self.emus {
            emu.step(self.clock.now(), 1);
        }
    }
}

/// Callback of a waiting process that lets others run.
type Turn = Box<dyn FnMut() + Send>;

/// Virtual time in which a process waits for its devices while others take turns, or until it is
/// killed.
pub struct Turns {
    pub sim: Arc<SimClock>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    turn: Option<Turn>,
    /// Remaining pauses until the process is killed.
    kill_in: Option<u64>,
}

/// Panic payload of a killed process.
pub struct Killed;

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sim.fmt(f)
    }
}

impl Turns {
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self { sim: SimClock::new(seed), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills the waiting process after `pauses` pauses; `None` disables that.
    pub fn kill_in(&self, pauses: Option<u64>) {
        self.state().kill_in = pauses;
    }

    /// Runs `act`, and calls `turn` at each pause.
    pub fn during<T>(&self, turn: impl FnMut() + Send + 'static, act: impl FnOnce() -> T) -> T {
        self.state().turn = Some(Box::new(turn));
        let done = act();
        self.state().turn = None;
        done
    }
}

impl Clock for Turns {
    fn now(&self) -> Nanos {
        self.sim.now()
    }

    fn pause(&self, idle: u32, until: Nanos) {
        let turn = {
            let mut state = self.state();
            match &mut state.kill_in {
                Some(0) => {
                    *state = State::default();
                    drop(state);
                    resume_unwind(Box::new(Killed));
                }
                Some(left) => *left -= 1,
                None => {}
            }
            // Taken while it runs, so that its own waits do not recurse.
            state.turn.take()
        };
        if let Some(mut turn) = turn {
            turn();
            self.state().turn.get_or_insert(turn);
        }
        self.sim.pause(idle, until);
    }
}
