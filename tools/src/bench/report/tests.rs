use super::*;

#[test]
fn a_row_that_is_wrong_has_no_figures() {
    let row = |wrong: &[&str]| Row {
        of: vec![("size", "size", Value::Count(7))],
        figures: vec![("bytes_s", "bandwidth", Value::BytesPerSecond(2048.0))],
        spread: spread(&[1.0, 2.0, 1.5]),
        wrong: wrong.iter().map(|it| (*it).to_owned()).collect(),
    };
    let rows = vec![row(&[]), row(&["of a reason"])];
    let mut report = Report { rows, failed: 1, ..Report::new("x") };
    report.notes = report.all_notes();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["rows"][0]["bytes_s"], 2048.0);
    assert!(json["rows"][1].get("bytes_s").is_none() && json["failed"] == 1, "{json}");
    assert!(json["notes"].to_string().contains("noisy: 1 of 1"), "{json}");
    assert!(json["run"]["date"].as_str().is_some_and(|date| date.starts_with("20")), "{json}");
    let text = report.text();
    assert!(text.matches("2.00 KiB/s").count() == 1 && text.contains("failed"), "{text}");
    assert!(text.contains("error: size 7: no figures, because of a reason"), "{text}");
    assert!(text.contains("noisy: 1 of 1") && !text.contains("checked:"), "{text}");
}
