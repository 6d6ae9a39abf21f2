use super::*;

#[test]
fn a_size_above_zero_is_read() {
    assert!(above_zero("0KiB").is_err());
    assert_eq!(above_zero("1KiB"), Ok(1024));
    assert!(memory("64").unwrap_err().starts_with("64 B; expected 0, or 1MiB or more"));
    assert_eq!([memory("0"), memory("64GiB")], [Ok(0), Ok(64 << 30)]);
}

#[test]
fn counts_are_read() {
    assert_eq!(count::<u32>(1..=64)("64"), Ok(64));
    assert_eq!(count::<u64>(0..=u64::MAX)("1_000"), Ok(1000));
    for text in ["0", "65", "-3", "1k", "1.5", ""] {
        let error = count::<u32>(1..=64)(text).unwrap_err();
        assert_eq!(error, "expected a whole number from 1 to 64", "{text}");
    }
    let error = count::<u32>(1..=u64::from(u32::MAX))("1k").unwrap_err();
    assert!(error.contains("without a unit, 1 or more"), "{error}");
}

#[test]
fn counts_are_shown() {
    assert_eq!(grouped(288_500), "288,500");
    assert_eq!(grouped(1_000_000), "1,000,000");
    assert_eq!(grouped(12), "12");
}
