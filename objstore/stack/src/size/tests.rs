use super::*;

#[test]
fn sizes_are_shown() {
    for (bytes, text) in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (64 << 20, "64 MiB"),
        (748_707_840, "714 MiB"),
        (1023 << 20, "1 GiB"),
        (3 << 29, "1.5 GiB"),
    ] {
        assert_eq!(Size(bytes).to_string(), text);
    }
}

#[test]
fn sizes_are_read() {
    for (text, bytes) in [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("64 mib", 64 << 20),
        ("64Mi", 64 << 20),
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
        assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
    }
    for text in ["", "MiB", "1.5", "1.MiB", ".5MiB", "1,5MiB", "-1", "_1", "1_", "12 parsecs"] {
        assert!(text.parse::<Size>().unwrap_err().contains("such as 64MiB"), "{text}");
    }
    for text in ["99999999999999999999", "17000000TiB", "16777216TiB"] {
        assert_eq!(text.parse::<Size>().unwrap_err(), "more than 16 EiB", "{text}");
    }
}
