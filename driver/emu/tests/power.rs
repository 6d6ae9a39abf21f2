//! Two drives on one switch: the power is cut at every moment of a run, and new controllers on the
//! same bytes find everything that was acknowledged as durable.

use std::sync::Arc;

use nvme_driver::{Controller, ControllerOptions, Error, LbaRange};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, MemoryMedia, PowerSwitch, SimClock, SimMedia, SimOptions,
};
use nvme_spec::ids::{Lba, Nsid};

const NSID: Nsid = Nsid(1);
const BLOCK: usize = 4096;
const BYTES: u64 = 1 << 20;

/// Controllers on some bytes, from power-on until they are dropped.
struct Life {
    emus: Vec<Arc<Emu>>,
    drives: Vec<Controller>,
    power: PowerSwitch,
}

impl Life {
    fn new(bytes: &[MemoryMedia], seed: u64) -> Self {
        let clock = SimClock::new(seed);
        let (domain, power) = (EmuDomain::new("power"), PowerSwitch::default());
        let emu = |(at, bytes): (usize, &MemoryMedia)| {
            let options = SimOptions { seed: seed + at as u64, ..SimOptions::default() };
            let config = EmuConfig { power: Some(power.clone()), ..EmuConfig::new("emu") }
                .namespace(SimMedia::new(bytes.clone(), options), BLOCK as u32);
            Emu::new(domain.clone(), config).unwrap()
        };
        let emus: Vec<_> = bytes.iter().enumerate().map(emu).collect();
        emus.iter().for_each(|emu| clock.drive(emu.clone()));
        let attach = |emu: &Arc<Emu>| {
            Controller::attach(emu.bus(), clock.clone(), ControllerOptions::default()).unwrap()
        };
        Self { drives: emus.iter().map(attach).collect(), emus, power }
    }

    /// Writes rounds to both drives, and after each round its number to block 0 of the first.
    /// `acknowledged`: rounds that were flushed.
    fn work(&mut self, acknowledged: &mut u8) -> Result<(), Error> {
        for round in 1..=3u8 {
            for drive in &mut self.drives {
                drive.write(NSID, Lba(8), &vec![round; 6 * BLOCK], false)?;
                drive.deallocate(NSID, &[LbaRange { lba: Lba(30), lbas: 2 }])?;
                drive.flush(NSID)?;
            }
            self.drives[0].write(NSID, Lba(0), &[round; BLOCK], true)?;
            *acknowledged = round;
        }
        Ok(())
    }
}

/// Runs until a power cut at `moment`. Returns the bytes, acknowledged rounds, and moments.
fn crash(moment: Option<u64>, seed: u64) -> (Vec<MemoryMedia>, u8, u64) {
    let bytes: Vec<_> = (0..2).map(|_| MemoryMedia::new(BYTES).unwrap()).collect();
    let mut life = Life::new(&bytes, seed);
    moment.inspect(|moment| life.power.cut_at(*moment));
    let mut acknowledged = 0;
    let result = life.work(&mut acknowledged);
    assert_eq!(life.power.is_cut(), result.is_err(), "{moment:?}");
    if result.is_err() {
        let mut block = vec![0; BLOCK];
        for drive in &mut life.drives {
            drive.read(NSID, Lba(0), &mut block).expect_err("all of them are gone");
        }
        assert!(life.emus.iter().all(|emu| emu.read32(0x1C) == u32::MAX));
    }
    let moments = life.power.moments();
    (bytes, acknowledged, moments)
}

fn contents(bytes: &[MemoryMedia]) -> Vec<Vec<u8>> {
    let content = |bytes: &MemoryMedia| {
        let mut all = vec![0; BYTES as usize];
        bytes.peek(0, &mut all).unwrap();
        all
    };
    bytes.iter().map(content).collect()
}

#[test]
fn every_moment_leaves_what_was_acknowledged() {
    let (_, rounds, moments) = crash(None, 1);
    assert_eq!(rounds, 3);
    // Three for each write, deallocation and flush of two drives, and for the write of the round.
    assert_eq!(moments, 3 * (3 * 3 * 2 + 3));
    let (mut unacknowledged, mut mixed) = (0, 0);
    for (seed, moment) in (1..5).flat_map(|seed| (0..moments).map(move |at| (seed, at))) {
        let (bytes, acknowledged, seen) = crash(Some(moment), seed);
        assert_eq!(seen, moment + 1);
        let mut life = Life::new(&bytes, seed);
        let mut marker = vec![0; BLOCK];
        life.drives[0].read(NSID, Lba(0), &mut marker).unwrap();
        let marker = marker[0];
        assert!(
            marker == acknowledged || marker == acknowledged + 1,
            "seed {seed}, moment {moment}: {acknowledged} were acknowledged, found {marker}"
        );
        unacknowledged += u32::from(marker > acknowledged);
        for drive in &mut life.drives {
            let mut data = vec![0; 6 * BLOCK];
            drive.read(NSID, Lba(8), &mut data).unwrap();
            assert!(data.iter().all(|byte| (marker..=marker + 1).contains(byte)));
            mixed += u32::from(data[0] != data[5 * BLOCK]);
        }
    }
    assert!(unacknowledged > 0, "a crash between effect and completion");
    assert!(mixed > 0, "a write in flight or in a cache was lost in part");
}

#[test]
fn the_same_seed_leaves_the_same_bytes() {
    for moment in [3, 10, 27] {
        let [first, again] = [(); 2].map(|()| contents(&crash(Some(moment), 7).0));
        assert!(first == again, "moment {moment}");
    }
}

#[test]
fn controllers_that_end_without_another_step_lose_power_even_so() {
    let lost = |seed| {
        let bytes = [MemoryMedia::new(BYTES).unwrap()];
        let mut life = Life::new(&bytes, seed);
        life.drives[0].write(NSID, Lba(0), &[9; BLOCK], false).unwrap();
        life.power.cut();
        drop(life);
        contents(&bytes)[0][0] == 0
    };
    let count = (0..32).filter(|seed| lost(*seed)).count();
    assert!((4..28).contains(&count), "{count} of 32 unflushed writes were lost");
}
