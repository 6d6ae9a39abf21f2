//! A controller that answers garbage: in registers, in identify data, and in every byte of memory
//! that was mapped for it. Or one that is honest, and fails.
//!
//! There must be no panic, and every call must end. With an honest one, a read that returns Ok has
//! the right bytes, and only memory that was given to the device is reached. `RIPIENO_SOAK=100`
//! tries 100 times as many seeds.

use std::sync::{Arc, Mutex};

use bolero::{TypeGenerator, check};
use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, DmaSpace, DoorbellPage, Gone, Interrupt,
    InterruptError, LbaRange, Nanos, ResetError, State,
};
use nvme_emu::{EmuConfig, FaultPlan, IdentifyOverrides, IdentifyPatch};
use nvme_spec::{
    admin::LogPageId,
    ids::{Lba, Nsid},
    reg,
};
use rand::Rng;

use crate::{
    LBA, Rig,
    choices::{Choices, Draws},
    soak::{self, Model},
};

const NS: Nsid = Nsid(1);
/// Longer than the longest call: three attempts of a reset, each with CAP.TO at its largest, and
/// the timeouts of the commands in between.
const LONGEST: Nanos = Nanos::from_millis(3_600_000);

/// Chance, and how much of it is bad: one in so many reads and pauses.
#[derive(Debug)]
struct Malice {
    random: Draws,
    /// If not set, it only fails, by its plan of faults.
    lies: bool,
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
        if !malice.lies || !malice.random.random_ratio(1, one_in) {
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
        if !malice.lies || ranges.is_empty() || !malice.random.random_ratio(1, one_in) {
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

/// Makes one of the calls that a user of the driver has. Compares blocks with `model`, if there is
/// one.
fn call(ctrl: &mut Controller, random: &mut Draws, salt: u64, mut model: Option<&mut Model>) {
    let lbas = random.random_range(1..200);
    let mut data = vec![0; LBA * lbas as usize];
    let lba = Lba(random.random_range(0..1000));
    let range = LbaRange { lba, lbas: 77 };
    // Bytes are compared: most calls move some.
    let kinds = if model.is_some() { 26 } else { 13 };
    let mut wrote = |lbas: u64, salt: Option<u64>| {
        if let Some(model) = &mut model {
            model.fill(lba.0, lbas, salt);
        }
    };
    let _ = match random.random_range(0..kinds) {
        0 | 13..19 => {
            let read = ctrl.read(NS, lba, &mut data);
            if let (Ok(()), Some(model)) = (&read, &model) {
                model.check(lba.0, &data, "read");
            }
            read
        }
        1 | 19..26 => {
            let written = ctrl.write(NS, lba, &Model::data(salt, lba.0, lbas), true);
            wrote(lbas, written.is_ok().then_some(salt));
            written
        }
        2 => ctrl.flush(NS),
        3 => {
            wrote(range.lbas, None);
            ctrl.deallocate(NS, &[range])
        }
        4 => {
            let written = ctrl.write_zeroes(NS, range, true);
            wrote(range.lbas, written.is_ok().then_some(0));
            written
        }
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
            let len = data.len().min(4096);
            ctrl.log_bytes(LogPageId(0xc2), NS, 0, &mut data[..len])
        }
        _ => ctrl.reset(),
    };
    if matches!(ctrl.state(), State::Failed(_)) && random.random() {
        let _ = ctrl.reset();
    }
}

/// Input of the fuzzer.
#[derive(Debug, TypeGenerator)]
struct Input {
    lies: bool,
    device: Choices,
    user: Choices,
}

fn torment(Input { lies, device, user }: &Input) {
    let (lies, mut device, mut random) = (*lies, device.draws(), user.draws());
    let rig = Arc::new(Rig::new(EmuConfig { mqes: 64, ..EmuConfig::new("emu0") }));
    let (registers, memory) = (device.random_range(20..2000), device.random_range(5..500));
    let malice = Arc::new(Mutex::new(Malice { random: device, lies, registers, memory }));
    let evil = Arc::new(Evil { bus: rig.emu.bus(), rig: rig.clone(), malice });
    let ended = |what: &str, since: Nanos| {
        let took = rig.clock.now() - since;
        assert!(took < LONGEST, "{what} took {took:?}");
    };
    let mut model = (!lies).then(Model::new);
    for round in 0..3 {
        let faults = if lies { lies_about_itself(&mut random) } else { FaultPlan::default() };
        rig.emu.set_faults(faults);
        let options =
            ControllerOptions { io_queues: 4, bounce_bytes: 64 << 10, ..Default::default() };
        let since = rig.clock.now();
        let attached = Controller::attach(evil.clone(), evil.clone(), options);
        ended("attach", since);
        let Ok(mut ctrl) = attached else { continue };
        if !lies {
            rig.emu.set_faults(soak::plan(&mut random));
        }
        for step in 1..=20 {
            let since = rig.clock.now();
            call(&mut ctrl, &mut random, 20 * round + step, model.as_mut());
            ended("a call", since);
        }
        // Queues that stay granted keep the controller and its media for good.
        for qid in ctrl.queue_ids().collect::<Vec<_>>() {
            let proof = crate::grants::quiesced(&ctrl);
            let _ = ctrl.reclaim(qid, &proof);
        }
        let since = rig.clock.now();
        let _ = ctrl.shutdown();
        ended("shutdown", since);
    }
    assert!(lies || rig.domain.refused() == 0, "DMA to memory not its own");
}

fn lies_about_itself(random: &mut Draws) -> FaultPlan {
    let patches = (0..random.random_range(0..4)).map(|_| IdentifyPatch {
        cns: random.random_range(0..7),
        offset: random.random_range(0..600),
        bytes: (0..random.random_range(1..40)).map(|_| random.random()).collect(),
    });
    let identify = IdentifyOverrides { patches: patches.collect(), ..Default::default() };
    FaultPlan { seed: random.random(), identify, ..FaultPlan::default() }
}

#[test]
fn garbage_never_panics_and_every_call_ends() {
    let times = std::env::var("RIPIENO_SOAK").map_or(1, |times| times.parse().expect("a number"));
    let seeds = 60 * times;
    for seed in 0..seeds {
        let [device, user] = [!seed, seed].map(Choices::of);
        let input = Input { lies: seed % 4 > 0, device, user };
        let done = std::panic::catch_unwind(|| torment(&input));
        done.unwrap_or_else(|_| panic!("seed {seed}"));
    }
}

#[test]
fn device() {
    check!(name = "device").with_type::<Input>().with_iterations(300).for_each(torment);
}
