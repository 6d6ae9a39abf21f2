use super::*;

#[test]
fn a_report_becomes_bandwidth_and_cpu_time() {
    let text = br#"fio: a warning
        {"jobs": [{"error": 0, "job_runtime": 4000, "usr_cpu": 10.0, "sys_cpu": 15.0,
          "read": {"io_bytes": 1048576, "runtime": 2000, "bw": 512},
          "write": {"io_bytes": 0, "runtime": 0}}]}"#;
    let pass = parse(text, Direction::Read).unwrap();
    assert_eq!((pass.bytes, pass.seconds, pass.cpu_seconds), (1 << 20, 2.0, 1.0));
    assert!(parse(text, Direction::Write).is_err(), "nothing was written");
    let failed = text.escape_ascii().to_string();
    assert!(parse(failed.replace("error", "other").as_bytes(), Direction::Read).is_err());
}
