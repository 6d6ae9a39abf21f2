use super::*;

#[test]
fn sizes_are_read() {
    for (text, bytes) in [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("2G", 2 << 30),
        ("1k", 1 << 10),
        ("500GB", 500_000_000_000),
        ("1.5MiB", 3 << 19),
        ("1.0005kB", 1000),
        ("0.25TiB", 1 << 38),
        ("1_000", 1000),
        ("1_024KiB", 1 << 20),
        ("18446744073709551615", u64::MAX),
        ("7b", 7),
    ] {
        assert_eq!(parse(text), Ok(bytes), "{text}");
    }
    for text in ["", "MiB", "1.5", "1.MiB", ".5MiB", "1,5MiB", "-1", "_1", "1_", "12 parsecs"] {
        assert!(parse(text).unwrap_err().contains("such as 64MiB"), "{text}");
    }
    for text in ["99999999999999999999", "17000000TiB", "16777216TiB"] {
        assert_eq!(parse(text).unwrap_err(), "more than 16 EiB", "{text}");
    }
    assert!(above_zero("0KiB").is_err());
    assert_eq!(above_zero("1"), Ok(1));
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
