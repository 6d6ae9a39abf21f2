//! Random work on a controller with random faults, against a plain vector.
//!
//! Invariants: a successful read returns the last written data; an abandoned command never touches
//! its memory again; the controller never accesses memory that is not its own; and a reset without
//! faults always recovers it.

use nvme_driver::{ControllerOptions, DescriptorPreference, Error, Nanos, State, TimeoutOutcome};
use nvme_emu::{EmuConfig, FaultAction, FaultPlan, FaultRule, FaultWhen};
use nvme_spec::{
    ids::{Lba, Nsid},
    status::Status,
};
use rand::{Rng, SeedableRng as _, rngs::SmallRng};

use crate::{LBA, Rig, bytes, fill, pattern};

const NS: Nsid = Nsid(1);
/// Blocks that the work covers.
const SPAN: u64 = 4096;

pub(crate) fn plan(rng: &mut impl Rng) -> FaultPlan {
    let actions = [
        FaultAction::Drop,
        FaultAction::Delay { ns: 1_000_000 },
        FaultAction::Delay { ns: 30_000_000_000 },
        FaultAction::Status { code: Status::UNRECOVERED_READ_ERROR.0, dnr: true },
        FaultAction::Status { code: Status::INTERNAL_ERROR.0, dnr: false },
        FaultAction::WrongPhase,
        FaultAction::WrongCid,
        FaultAction::WrongSqhd,
        FaultAction::WrongSqid,
        FaultAction::Duplicate,
        FaultAction::FatalStatus,
        FaultAction::LinkLoss { ns: 200_000_000 },
    ];
    let rules = (0..rng.random_range(0..4))
        .map(|_| {
            let admin = match rng.random_range(0..4) {
                0 => Some(true),
                1 => None,
                _ => Some(false),
            };
            let probability = Some(0.002 * (1 << rng.random_range(0..5)) as f64);
            let when = FaultWhen { admin, probability, ..FaultWhen::default() };
            FaultRule::new(when, actions[rng.random_range(0..actions.len())])
        })
        .collect();
    FaultPlan { seed: rng.random(), rules, ..FaultPlan::default() }
}

/// Contents of each block: `None` after a write to it that failed halfway.
pub(crate) struct Model(Vec<Option<u64>>);

impl Model {
    /// All zeros.
    pub(crate) fn new() -> Self {
        Self(vec![Some(0); SPAN as usize])
    }

    pub(crate) fn fill(&mut self, lba: u64, lbas: u64, salt: Option<u64>) {
        self.0[lba as usize..(lba + lbas) as usize].fill(salt);
    }

    fn block(salt: u64, lba: u64) -> Vec<u8> {
        pattern(LBA, salt.wrapping_mul(1 << 20) + lba)
    }

    pub(crate) fn data(salt: u64, lba: u64, lbas: u64) -> Vec<u8> {
        (lba..lba + lbas).flat_map(|lba| Self::block(salt, lba)).collect()
    }

    pub(crate) fn check(&self, lba: u64, found: &[u8], context: &str) {
        for (i, block) in found.chunks_exact(LBA).enumerate() {
            let lba = lba + i as u64;
            if let Some(salt) = self.0[lba as usize] {
                let zero = salt == 0 && block.iter().all(|b| *b == 0);
                assert!(zero || block == Self::block(salt, lba), "LBA {lba}, {context}");
            }
        }
    }
}

fn soak(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let rig = Rig::new(EmuConfig { mdts_bytes: Some(64 << 10), ..EmuConfig::new("emu0") });
    let descriptors =
        [DescriptorPreference::Sgl, DescriptorPreference::Prp][rng.random_range(0..2)];
    let options = ControllerOptions {
        descriptors,
        command_timeout: Nanos::from_millis(200),
        admin_timeout: Nanos::from_millis(300),
        abort_grace: Nanos::from_millis(20),
        ..Default::default()
    };
    let mut ctrl = rig.attach_with(options).unwrap();
    let mut model = Model::new();
    rig.emu.set_faults(plan(&mut rng));
    for step in 1..=40u64 {
        let context = format!("seed {seed}, step {step}, {descriptors:?}");
        let lba = rng.random_range(0..SPAN - 512);
        let lbas = 1 + rng.random_range(0..512);
        let mut given_up = None;
        let result = match rng.random_range(0..6) {
            0 | 1 => {
                let data = Model::data(step, lba, lbas);
                let result = ctrl.write(NS, Lba(lba), &data, false);
                model.fill(lba, lbas, result.is_ok().then_some(step));
                result
            }
            2 | 3 => {
                let mut back = vec![0; lbas as usize * LBA];
                let result = ctrl.read(NS, Lba(lba), &mut back);
                if result.is_ok() {
                    model.check(lba, &back, &context);
                }
                result
            }
            4 => {
                let slice = rig.alloc(lbas as usize * LBA);
                let part = slice.slice(0, lbas as usize * LBA).unwrap();
                let result = ctrl.read_dma(NS, Lba(lba), std::slice::from_ref(&part));
                match &result {
                    Ok(()) => model.check(lba, &bytes(&part), &context),
                    Err(Error::Timeout { outcome, .. })
                        if *outcome != TimeoutOutcome::ControllerFailed =>
                    {
                        given_up = Some(part);
                    }
                    Err(_) => {}
                }
                result
            }
            _ => ctrl.smart_log().map(|_| ()).and_then(|()| ctrl.flush(NS)),
        };
        if let Some(part) = given_up {
            fill(&part, &vec![0xA5; part.len()]);
            rig.clock.run_for(Nanos::from_millis(40_000));
            assert!(bytes(&part).iter().all(|b| *b == 0xA5), "memory given up, {context}");
        }
        if let (Err(_), State::Failed(_)) = (&result, ctrl.state()) {
            rig.emu.set_faults(FaultPlan::default());
            ctrl.reset().unwrap_or_else(|error| panic!("{error}, {context}"));
            rig.emu.set_faults(plan(&mut rng));
        }
    }
    rig.emu.set_faults(FaultPlan::default());
    ctrl.reset().unwrap_or_else(|error| panic!("{error}, seed {seed}"));
    let mut back = vec![0; SPAN as usize * LBA];
    ctrl.read(NS, Lba(0), &mut back).unwrap();
    model.check(0, &back, &format!("seed {seed}, at the end"));
    drop(ctrl);
    assert_eq!(rig.domain.refused(), 0, "DMA to memory not its own, seed {seed}");
}

#[test]
fn random_faults_never_give_wrong_bytes() {
    for seed in 0..60 {
        soak(seed);
    }
}
