use super::*;

fn parts(verify: Verify, object: u32, key: u128, row: u32) -> Vec<Part> {
    let mut name = [0; 32];
    name[..16].copy_from_slice(&key.to_le_bytes());
    Sampler::new(verify, 1, object).parts(3, BlockKey(name), row).collect()
}

#[test]
fn parts_cover_what_is_documented() {
    assert_eq!(parts(Verify::Full, 1024, 9, 1), [(0, 1024)]);
    assert!(parts(Verify::Off, 1024, 9, 1).is_empty());
    assert_eq!(parts(Verify::Sampled, 128, 9, 1), [(0, 128)]);
    for object in [1024, 1028] {
        let mut whole = 0;
        for key in 0..1000u128 {
            for row in 0..16 {
                match parts(Verify::Sampled, object, key << 17, row)[..] {
                    [all] => {
                        assert_eq!(all, (0, object as usize));
                        whole += 1;
                    }
                    [first, (start, len)] => {
                        assert_eq!(first, (0, 64));
                        assert!(start.is_multiple_of(8) && (64..72).contains(&len));
                        assert_eq!(start + len, object as usize);
                    }
                    _ => panic!("no part of an object is checked"),
                }
            }
        }
        assert!((800..1200).contains(&whole), "{whole} of 16000 objects as a whole");
    }
}

#[test]
fn only_the_first_mismatches_are_kept() {
    let mut findings = Findings::default();
    let difference = Difference { offset: 8, expected: 1, found: 0xDEAD_BEEF };
    for block in 0..100 {
        findings.add(Mismatch::new(Some(4), block, (1, 0), difference));
    }
    assert_eq!((findings.mismatches, findings.shown.len()), (100, SHOWN_MAX));
    assert_eq!(
        findings.shown[2].to_string(),
        "request 4, block 2, layer 1, segment 0, offset 8: expected 0x00000001, found \
         0xdeadbeef"
    );
}
