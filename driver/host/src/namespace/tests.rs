use super::*;

fn good() -> IdentifyNamespace {
    let mut data = IdentifyNamespace { nsze: 1000, ncap: 1000, ..Default::default() };
    data.lbaf[0] = LbaFormat::new(12, 0);
    data
}

#[test]
fn a_good_one() {
    let info = NamespaceInfo::check(Nsid(3), &good()).unwrap();
    assert_eq!((info.nsid, info.lbas, info.lba_bytes()), (Nsid(3), 1000, 4096));
}

#[test]
fn deallocation_is_advised_only_where_nsfeat_says_so() {
    let mut data = IdentifyNamespace { npdg_z: 7, npda_z: 65_535, ..good() };
    let advice = |data: &IdentifyNamespace| {
        let info = NamespaceInfo::check(Nsid(1), data).unwrap();
        (info.deallocate_granularity_lbas, info.deallocate_alignment_lbas)
    };
    assert_eq!(advice(&data), (1, 1));
    data.nsfeat = 1 << 4;
    assert_eq!(advice(&data), (8, 65_536));
}

#[test]
fn absurd_ones() {
    let refused = |change: fn(&mut IdentifyNamespace)| {
        let mut data = good();
        change(&mut data);
        NamespaceInfo::check(Nsid(1), &data).unwrap_err()
    };
    assert_eq!(refused(|d| d.nsze = 0), NamespaceError::Empty);
    assert_eq!(refused(|d| d.flbas = 1), NamespaceError::NoFormat { index: 1, count: 1 });
    assert_eq!(
        refused(|d| (d.flbas, d.nlbaf_z) = (0x6F, 255)),
        NamespaceError::LbaSize { lbads: 0 }
    );
    for lbads in [0, 8, 17, 64, 255] {
        let mut data = good();
        data.lbaf[0] = LbaFormat::new(lbads, 0);
        let found = NamespaceInfo::check(Nsid(1), &data).unwrap_err();
        assert_eq!(found, NamespaceError::LbaSize { lbads });
    }
    assert_eq!(
        refused(|d| d.lbaf[0] = LbaFormat::new(9, 8)),
        NamespaceError::Metadata { bytes: 8 }
    );
    assert_eq!(refused(|d| d.dps = 1), NamespaceError::Protection { dps: 1 });
    assert_eq!(
        refused(|d| d.nsze = u64::MAX),
        NamespaceError::TooLarge { lbas: u64::MAX, shift: 12 }
    );
}
