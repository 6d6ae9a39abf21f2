use super::*;

fn cap() -> Cap {
    Cap::default().with_mqes_z(1023).with_css(1).with_to_500ms(4)
}

fn identify() -> IdentifyController {
    IdentifyController { sqes: 0x66, cqes: 0x44, mdts: 5, ..Default::default() }
}

fn check(data: &IdentifyController) -> Result<ControllerInfo, String> {
    let caps = Capabilities::check(cap(), Crto(0), Version::new(1, 4, 0), 4)?;
    ControllerInfo::check(data, &caps, DescriptorPreference::Auto)
}

#[test]
fn a_good_one() {
    let info = check(&identify()).unwrap();
    assert_eq!(info.mdts_bytes, Some(128 << 10));
    assert_eq!(info.entries_max, 1024);
    assert_eq!(info.descriptor_mode, DescriptorMode::Prp { page_bytes: 4096 });
}

#[test]
fn the_longer_ready_timeout_counts() {
    let caps = |crto| Capabilities::check(cap(), Crto(crto), Version::new(2, 1, 0), 4).unwrap();
    assert_eq!(caps(0).ready_timeout, Nanos::from_millis(2_000), "CAP.TO");
    assert_eq!(caps(300).ready_timeout, Nanos::from_millis(150_000), "CRTO.CRWMT");
}

#[test]
fn absurd_registers() {
    let refused = |cap: Cap| Capabilities::check(cap, Crto(0), Version::default(), 4).unwrap_err();
    assert!(refused(cap().with_mqes_z(0)).contains("MQES"));
    assert!(refused(cap().with_css(0)).contains("CSS"));
    assert!(refused(cap().with_mpsmin(3)).contains("MPSMIN"));
    assert!(refused(cap().with_mpsmin(15).with_mpsmax(15)).contains("page"));
    assert!(refused(cap().with_dstrd(15)).contains("DSTRD"));
    // All ones is what an absent controller returns; it must not cause an overflow.
    assert!(Capabilities::check(Cap(u64::MAX), Crto(u32::MAX), Version(u32::MAX), 4).is_err());
}

#[test]
fn a_shutdown_is_given_time() {
    let timeout = |rtd3e| check(&IdentifyController { rtd3e, ..identify() }).unwrap();
    let timeout = |rtd3e| timeout(rtd3e).shutdown_timeout;
    assert_eq!(timeout(0), Nanos::from_millis(10_000), "not reported");
    assert_eq!(timeout(1_000_000), Nanos::from_millis(10_000));
    assert_eq!(timeout(30_000_000), Nanos::from_millis(30_000));
    assert_eq!(timeout(u32::MAX), Nanos::from_millis(60_000));
}

#[test]
fn absurd_identify() {
    let refused = |change: fn(&mut IdentifyController)| {
        let mut data = identify();
        change(&mut data);
        check(&data).unwrap_err()
    };
    assert!(refused(|d| d.mdts = 255).contains("MDTS"));
    assert!(refused(|d| d.sqes = 0x77).contains("submission"));
    assert!(refused(|d| d.cqes = 0).contains("completion"));
    assert!(refused(|d| d.cntrltype = 2).contains("I/O controller"));
    assert!(check(&zerocopy::FromBytes::read_from_bytes(&[0xFF; 4096]).unwrap()).is_err());
}

#[test]
fn modes() {
    let mode = |sgls, preference| descriptor_mode(Sgls(sgls), 4096, preference);
    let byte = DescriptorMode::Sgl { bit_bucket: true, granularity: 1 };
    let dword = DescriptorMode::Sgl { bit_bucket: false, granularity: 4 };
    let prp = DescriptorMode::Prp { page_bytes: 4096 };
    assert_eq!(mode(0x1_0001, DescriptorPreference::Auto), Ok(byte));
    assert_eq!(mode(2, DescriptorPreference::Sgl), Ok(dword));
    assert_eq!(mode(3, DescriptorPreference::Auto), Ok(prp));
    assert_eq!(mode(1, DescriptorPreference::Prp), Ok(prp));
    assert!(mode(0, DescriptorPreference::Sgl).is_err());
}
