//! A controller that answers garbage: in registers, in identify data, and in every byte of memory
//! that was mapped for it.
//!
//! What must hold: no panic, and every call ends. `RIPIENO_SOAK=100` tries 100 times as many seeds.

use std::sync::{Arc, Mutex};

use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, DmaSpace, DoorbellPage, Gone, Interrupt,
    InterruptError, LbaRange, Nanos, PassthroughData, ResetError, State,
};
use nvme_emu::{EmuConfig, FaultPlan, IdentifyOverrides, IdentifyPatch};
use nvme_spec::{
    admin::AdminOpcode,
    ids::{Cid, Lba, Nsid},
    reg,
    sqe::Sqe,
};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::{LBA, Rig};

const NS: Nsid = Nsid(1);
/// Longer than the longest call: three attempts of a reset, each with CAP.TO at its largest, and
/// the timeouts of the commands in between.
const LONGEST: Nanos = Nanos::from_millis(3_600_000);

/// Chance, and how much of it is bad: one in so many reads and pauses.
#[derive(Debug)]
struct Malice {
    random: SmallRng,
    registers: u32,
    memory: u32,
}

#[derive(Debug, Clone)]
struct Evil {
    bus: Arc<dyn Bus>,
    rig: Arc<Rig>,
    malice: Arc<Mutex<Malice>>,
}

impl Bus for Evil {
    fn id(&self) -> &str {
        self.bus.id()
    }

    fn read32(&self, offset: u32) -> Result<u32, Gone> {
        let value = self.bus.read32(offset)?;
        let mut malice = self.malice.lock().unwrap();
        let one_in = malice.registers;
        if !malice.random.random_ratio(1, one_in) {
            return Ok(value);
        }
        let random = malice.random.random::<u32>();
        Ok(match random % 5 {
            0 => return Err(Gone),
            1 => reg::ALL_ONES,
            2 => 0,
            3 => value ^ (1 << ((random >> 8) % 32)),
            _ => random,
        })
    }

    fn write32(&self, offset: u32, value: u32) -> Result<(), Gone> {
        self.bus.write32(offset, value)
    }

    fn doorbells(&self) -> DoorbellPage {
        self.bus.doorbells()
    }

    fn dma(&self) -> &Arc<dyn DmaSpace> {
        self.bus.dma()
    }

    fn pci_id(&self) -> Option<(u16, u16)> {
        None
    }

    fn numa_node(&self) -> Option<u32> {
        None
    }

    fn requested(&self) -> bool {
        self.malice.lock().unwrap().random.random_ratio(1, 20)
    }

    fn pcie_error(&self) -> bool {
        self.malice.lock().unwrap().random.random_ratio(1, 20)
    }

    fn interrupt(&self, vector: u16) -> Result<Interrupt, InterruptError> {
        self.bus.interrupt(vector)
    }

    fn reset(&self) -> Result<(), ResetError> {
        if self.malice.lock().unwrap().random.random() {
            return Err(ResetError::Unsupported { bus: "evil".into() });
        }
        self.bus.reset()
    }
}

impl Clock for Evil {
    fn now(&self) -> Nanos {
        self.rig.clock.now()
    }

    /// Writes where a controller may: into anything that was mapped.
    fn pause(&self, idle: u32, until: Nanos) {
        self.rig.clock.pause(idle, until);
        let mut malice = self.malice.lock().unwrap();
        let (one_in, ranges) = (malice.memory, self.rig.domain.mapped());
        if ranges.is_empty() || !malice.random.random_ratio(1, one_in) {
            return;
        }
        let range = ranges[malice.random.random_range(0..ranges.len())];
        // Most things of interest lie at the beginning.
        let end = range.len.min(if malice.random.random() { 256 } else { range.len });
        let at = malice.random.random_range(0..end / 4) * 4;
        let values: [u32; 4] = malice.random.random();
        let access = self.rig.domain.access();
        for (at, value) in (at..range.len).step_by(4).zip(values) {
            let _ = access.write_u32(range.iova.offset(at), value);
        }
    }
}

/// Everything that the driver's user can do.
fn call(ctrl: &mut Controller, random: &mut SmallRng) {
    let mut data = vec![0; LBA * random.random_range(1..200)];
    let lba = Lba(random.random_range(0..1000));
    let _ = match random.random_range(0..13) {
        0 => ctrl.read(NS, lba, &mut data),
        1 => ctrl.write(NS, lba, &data, true),
        2 => ctrl.flush(NS),
        3 => ctrl.deallocate(NS, &[LbaRange { lba, lbas: 77 }]),
        4 => ctrl.write_zeroes(NS, LbaRange { lba, lbas: 77 }, true),
        5 => ctrl.poll_events().map(|_| ()),
        6 => ctrl.smart_log().map(|_| ()).and_then(|()| ctrl.error_log().map(|_| ())),
        7 => ctrl.rescan(),
        8 => ctrl.create_queue_pair(16).and_then(|qid| ctrl.grant(qid, NS)).map(|_| ()),
        9 => ctrl.recover(&crate::grants::quiesced(ctrl)).map(|_| ()),
        10 => {
            let qid = ctrl.queue_ids().next();
            let proof = crate::grants::quiesced(ctrl);
            qid.map_or(Ok(()), |qid| ctrl.reclaim(qid, &proof).map(|_| ()))
        }
        11 => {
            let sqe = Sqe::new(AdminOpcode(0xc2).0, Cid(0), NS);
            let timeout = Nanos::from_millis(1_000);
            ctrl.admin_passthrough(sqe, PassthroughData::In(&mut data), timeout).map(|_| ())
        }
        _ => ctrl.reset(),
    };
    if matches!(ctrl.state(), State::Failed(_)) && random.random() {
        let _ = ctrl.reset();
    }
}

fn torment(seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let rig = Arc::new(Rig::new(EmuConfig { mqes: 64, ..EmuConfig::new("emu0") }));
    let malice = Malice {
        registers: random.random_range(20..2000),
        memory: random.random_range(5..500),
        random: SmallRng::seed_from_u64(!seed),
    };
    let malice = Arc::new(Mutex::new(malice));
    let evil = Arc::new(Evil { bus: rig.emu.bus(), rig: rig.clone(), malice });
    for _ in 0..3 {
        let patches = (0..random.random_range(0..4)).map(|_| IdentifyPatch {
            cns: random.random_range(0..7),
            offset: random.random_range(0..600),
            bytes: (0..random.random_range(1..40)).map(|_| random.random()).collect(),
        });
        let identify = IdentifyOverrides { patches: patches.collect(), ..Default::default() };
        rig.emu.set_faults(FaultPlan { seed, identify, ..FaultPlan::default() });
        let options = ControllerOptions { io_queues: 4, ..Default::default() };
        let ended = |what: &str, since: Nanos| {
            let took = rig.clock.now() - since;
            assert!(took < LONGEST, "seed {seed}: {what} took {took:?}");
        };
        let since = rig.clock.now();
        let attached = Controller::attach(evil.clone(), evil.clone(), options);
        ended("attach", since);
        let Ok(mut ctrl) = attached else { continue };
        for _ in 0..20 {
            let since = rig.clock.now();
            call(&mut ctrl, &mut random);
            ended("a call", since);
        }
        let since = rig.clock.now();
        let _ = ctrl.shutdown();
        ended("shutdown", since);
    }
}

#[test]
fn garbage_never_panics_and_every_call_ends() {
    let times = std::env::var("RIPIENO_SOAK").map_or(1, |times| times.parse().expect("a number"));
    let seeds = 60 * times;
    for seed in 0..seeds {
        torment(seed);
    }
}
