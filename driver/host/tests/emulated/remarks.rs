//! Remarks on a drive, made when it is attached.

use nvme_driver::Remark;
use nvme_emu::{EmuConfig, FaultPlan, IdentifyOverrides, IdentifyPatch};
use nvme_spec::{admin::FeatureId, ids::Nsid};

use crate::Rig;

fn rig(identify: IdentifyOverrides) -> Rig {
    let faults = FaultPlan { identify, ..FaultPlan::default() };
    Rig::new(EmuConfig { faults, ..EmuConfig::new("emu0") })
}

fn patch(cns: u8, offset: u16, bytes: &[u8]) -> IdentifyOverrides {
    let patches = vec![IdentifyPatch { cns, offset, bytes: bytes.to_vec() }];
    IdentifyOverrides { patches, ..IdentifyOverrides::default() }
}

#[test]
fn a_good_drive_is_not_remarked_on() {
    assert_eq!(Rig::good().attach().info().remarks, []);
    let state = |sanitize| IdentifyOverrides { sanitize: Some(sanitize), ..Default::default() };
    // Never sanitized; done.
    for sanitize in [0, 1, 0x0101] {
        assert_eq!(rig(state(sanitize)).attach().info().remarks, []);
    }
}

#[test]
fn states_that_fail_commands_are_known_when_it_is_attached() {
    let state = |sanitize| IdentifyOverrides { sanitize: Some(sanitize), ..Default::default() };
    // HMPRE: 64 MiB in units of 4 KiB.
    for (identify, expected, words) in [
        (state(2), Remark::Sanitizing { percent: 50 }, "50 %"),
        (state(3), Remark::SanitizeFailed, "sanitize operation failed"),
        (patch(0, 99, &[1]), Remark::WriteProtected { nsid: Nsid(1) }, "namespace 1 is write prot"),
        (
            patch(1, 272, &16_384u32.to_le_bytes()),
            Remark::HostMemoryBuffer { bytes: 64 << 20 },
            "64 MiB",
        ),
    ] {
        let ctrl = rig(identify).attach();
        assert_eq!(ctrl.info().remarks, [expected]);
        assert!(expected.to_string().contains(words), "{expected}");
    }
}

#[test]
fn naps_are_switched_off_after_every_reset() {
    let rig = rig(IdentifyOverrides { apst: true, ..IdentifyOverrides::default() });
    let mut ctrl = rig.attach();
    let fid = FeatureId::AUTONOMOUS_POWER_STATE_TRANSITION;
    for _ in 0..2 {
        assert_eq!(ctrl.info().remarks, [Remark::PowerTransitions]);
        assert_eq!(ctrl.feature(fid).unwrap(), 0);
        ctrl.reset().unwrap();
    }
}
