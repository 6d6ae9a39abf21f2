use std::fs;

use super::*;

const HEADER: &str =
    r#"{"ripieno_layer_times": 1, "model": "m tp1", "gpu": "g", "engine": "vllm 1", "layers": 4}"#;

fn line(input: u32, prefix: u32, us: f64) -> String {
    format!(r#"{{"requests": [[{input}, {prefix}]], "layer_us": {us}}}"#)
}

fn parse(lines: &[&str]) -> Result<Steps, Problem> {
    let mut found = None;
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    Steps::take(&mut found, Path::new("times"), &text)?;
    Ok(found.unwrap())
}

/// Returns the microseconds of an undisturbed layer.
fn truth(input: u32, prefix: u32) -> f64 {
    let shape = StepShape::of([(input, prefix)]);
    200.0 + 700.0 * f64::from(shape.tokens) / 1e3 + 400.0 * shape.attended as f64 / 1e7
}

#[test]
fn lines_are_steps_of_the_setting_in_the_header() {
    let two = r#"{"requests": [[128, 1024], [1, 30]], "layer_us": 12.5}"#;
    // The second header is from the same engine after a restart.
    let found = parse(&[HEADER, two, HEADER, &line(1, 7, 3.0)]).unwrap();
    let setting = found.setting(vec!["drive".to_owned()]);
    assert_eq!(name(&setting), "m tp1 on g with vllm 1");
    assert_eq!(setting.drives, ["drive"]);
    let [first, second] = found.steps[..] else { panic!("{found:?}") };
    assert_eq!(first.shape, StepShape::of([(128, 1024), (1, 30)]));
    assert_eq!((first.prefix, first.layer), (1054, Duration::from_nanos(12_500)));
    assert_eq!((second.shape.is_prefill, second.prefix), (false, 7));
}

#[test]
fn what_cannot_be_used_is_refused_with_its_line() {
    let newer = HEADER.replace("times\": 1", "times\": 2");
    let other = HEADER.replace("tp1", "tp2");
    let good = line(5, 0, 1.0);
    for (lines, wanted) in [
        (&[&*good] as &[&str], "times:1: no header of layer times"),
        (&[&newer, &good], "times:1: layer times of version 2, and 1 can be read"),
        (
            &[HEADER, &good, &other],
            "times:3: times of m tp2 on g with vllm 1 follow those of m tp1",
        ),
        (&[HEADER, &good, "{\"requests\": [[1"], "times:3: EOF"),
        (&[HEADER, r#"{"requests": [[0, 5]], "layer_us": 1}"#], "times:2: requests"),
        (&[HEADER, r#"{"requests": [], "layer_us": 1}"#], "times:2: requests"),
        (&[HEADER, r#"{"requests": [[1, 4294967295]], "layer_us": 1}"#], "times:2: requests"),
        (&[HEADER, r#"{"requests": [[1, -5]], "layer_us": 1}"#], "times:2: invalid value"),
        (&[HEADER, r#"{"requests": [[1, 5]], "layer_us": 0}"#], "times:2: layer_us of 0"),
        (&[HEADER, r#"{"requests": [[1, 5]], "layer_us": 1e300}"#], "times:2: layer_us of 1"),
        (&[HEADER, r#"{"requests": [[1, 5]]}"#], "times:2: missing field"),
    ] {
        let problem = parse(lines).unwrap_err().to_string();
        assert!(problem.contains(wanted), "{wanted}: {problem}");
    }
}

#[test]
fn a_line_that_is_being_written_is_left_out() {
    let mut found = None;
    let text = format!("{HEADER}\n{}\n{{\"requests\": [[1, ", line(5, 0, 1.0));
    Steps::take(&mut found, Path::new("times"), &text).unwrap();
    assert_eq!(found.unwrap().steps.len(), 1);
}

#[test]
fn files_without_steps_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("times");
    for text in ["", HEADER] {
        fs::write(&path, text).unwrap();
        let problem = Steps::read(std::slice::from_ref(&path)).unwrap_err().to_string();
        assert!(problem.contains("there is no step in it"), "{problem}");
    }
}

/// Returns steps of four shapes in turn; one step in four takes ten times as long.
fn disturbed() -> Steps {
    let mut lines = vec![HEADER.to_owned()];
    for round in 0..24 {
        for (at, (input, prefix)) in [(128, 0), (128, 4096), (2048, 0), (1, 900)].iter().enumerate()
        {
            let hiccup = if (round + at) % 4 == 0 { 10.0 } else { 1.0 };
            lines.push(line(*input, *prefix, hiccup * truth(*input, *prefix)));
        }
    }
    parse(&lines.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
}

#[test]
fn outliers_change_nothing() {
    let steps = disturbed();
    let mut table = empty(steps.setting(Vec::new()));
    steps.teach(&mut table);
    for (input, prefix) in [(128, 0), (128, 4096), (2048, 0), (1, 900)] {
        let said = table.layer(StepShape::of([(input, prefix)])).unwrap().as_secs_f64() * 1e6;
        let right = truth(input, prefix);
        assert!((said / right - 1.0).abs() < 0.01, "{input} {prefix}: {said}, {right}");
    }
    let report = steps.report(None);
    for off in [&report.ahead, &report.fit] {
        assert!(off.prefill.unwrap() < 0.05 && off.decode.unwrap() < 0.01, "{report:?}");
    }
}

#[test]
fn another_table_is_compared_by_shape() {
    let steps = disturbed();
    let mut slower = empty(steps.setting(Vec::new()));
    for (input, prefix) in [(128, 0), (128, 4096), (2048, 0)] {
        let layer = Duration::from_secs_f64(1.2 * truth(input, prefix) * 1e-6);
        (0..9).for_each(|_| slower.learn(StepShape::of([(input, prefix)]), layer));
    }
    let report = steps.report(Some((Path::new("offline"), &slower)));
    let off = report.against_off.as_ref().unwrap();
    assert!((off.prefill.unwrap() - 0.2).abs() < 0.01, "{report:?}");
    let shapes = serde_json::to_value(&report.shapes).unwrap();
    let shapes = shapes.as_array().unwrap();
    assert!(off.decode.is_none() && shapes[3]["against_us"].is_null(), "it saw no decode");
    let of = |group: &serde_json::Value| {
        let number = |key| group[key].as_u64().unwrap();
        (group["is_prefill"].as_bool().unwrap(), number("input"), number("prefix"), number("steps"))
    };
    let prefill = [(true, 128, 0, 24), (true, 128, 4096, 24), (true, 2048, 0, 24)];
    let found: Vec<_> = shapes.iter().map(of).collect();
    assert_eq!(found, [prefill.as_slice(), &[(false, 1, 900, 24)]].concat());
    for group in &shapes[..3] {
        let off = group["against_us"].as_f64().unwrap() / group["layer_us"].as_f64().unwrap() - 1.0;
        assert!((off - 0.2).abs() < 0.01, "{group:?}");
    }
    let text = report.text();
    assert!(
        text.contains("+20 %") && text.contains("offline: 20.0 % (prefill), not known (decode)"),
        "{text}"
    );
}
