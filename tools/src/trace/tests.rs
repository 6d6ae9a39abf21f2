use std::io::Write;

use super::*;

const GOOD: &str =
    r#"{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}"#;

fn read_text(text: &str, limit: Option<usize>) -> Result<Vec<Request>, Problem> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    read(file.path(), limit)
}

#[test]
fn requests_are_read() {
    let more = GOOD.replace("[0, 1]", "[7, 18446744073709551615], \"extra\": {\"a\": [1]}");
    let requests = read_text(&format!("{GOOD}\n\n{more}\r\n"), None).unwrap();
    assert_eq!(requests.len(), 2);
    let (arrival, hash_ids) = (Duration::ZERO, vec![0, 1]);
    let first = Request { arrival, input_tokens: 700, output_tokens: 5, hash_ids };
    assert_eq!(requests[0], first);
    assert_eq!(requests[1].hash_ids, [7, u64::MAX]);
    assert_eq!(read_text(&format!("{GOOD}\n{more}"), Some(1)).unwrap().len(), 1);
    // Lines after the limit are not read.
    assert_eq!(read_text(&format!("{GOOD}\nnonsense"), Some(1)).unwrap().len(), 1);
}

fn line(time: &str, tokens: u64, ids: usize) -> String {
    let ids: Vec<usize> = (0..ids).collect();
    format!(
        "{{\"timestamp\": {time}, \"input_length\": {tokens}, \"output_length\": 5, \
         \"hash_ids\": {ids:?}}}\n"
    )
}

#[test]
fn a_trace_with_other_blocks_is_refused_and_their_size_is_guessed() {
    for (tokens, ids) in [(0, 0), (1, 1), (512, 1), (513, 2), (1024, 2)] {
        read_text(&line("0", tokens, ids), None).unwrap();
    }
    for (tokens, ids, what, guess) in [
        (1024, 64, "64 `hash_ids` for an `input_length` of 1,024 tokens; expected 2,", "of 16 tok"),
        (668, 42, "42 `hash_ids`", "blocks of 16 tokens? Those of Bailian's traces have 16"),
        (20, 2, "2 `hash_ids` for an `input_length` of 20 tokens; expected 1,", "of 16 tok"),
        (2048, 1, "1 `hash_ids`", "blocks of 2048 tokens?"),
        (1024, 5, "5 `hash_ids`", "no usual size"),
        (5, 0, "0 `hash_ids`", "no usual size"),
    ] {
        let text = line("0", 700, 2) + &line("1", tokens, ids);
        let problem = read_text(&text, None).unwrap_err();
        let said = problem.to_string();
        assert!(said.contains(":2: ") && said.contains(what), "{said}");
        assert!(problem.hint().contains(guess), "{}", problem.hint());
    }
}

#[test]
fn times_begin_with_the_first_arrival_by_any_clock() {
    let epoch = 1_790_000_000_000_u64;
    let text: String =
        [2000, 0, 500].iter().map(|ms| line(&(epoch + ms).to_string(), 5, 1)).collect();
    let arrivals: Vec<_> =
        read_text(&text, None).unwrap().iter().map(|it| it.arrival.as_millis()).collect();
    assert_eq!(arrivals, [2000, 0, 500]);
    // A clock that is another one in between, and another unit.
    let mixed = line("0", 5, 1) + "\n" + &line(&epoch.to_string(), 5, 1);
    let problem = read_text(&mixed, None).unwrap_err();
    let said = problem.to_string();
    assert!(said.contains(":3: field `timestamp`: it is 20717 days away from that of line 1"));
    assert!(problem.hint().contains("milliseconds"), "{}", problem.hint());
    let back = line(&epoch.to_string(), 5, 1) + &line("0", 5, 1);
    assert!(read_text(&back, None).unwrap_err().to_string().contains(":2: field `timestamp`"));
    // 20 days by a clock of milliseconds.
    let seconds = line("1790000001", 5, 1) + &line("1790000000.5", 5, 1);
    let problem = read_text(&seconds, None).unwrap_err();
    let said = problem.to_string();
    assert!(said.contains(":2: field `timestamp`: 1790000000 is the smallest"), "{said}");
    assert!(said.contains("seconds since 1970") && problem.hint().contains("by 1,000"));
    read_text(&(line("1000", 5, 1) + &seconds), None).unwrap();
    for wrong in ["1790000000000000", "1e300", "-1", "1e14 "] {
        let found = read_text(&line(wrong, 5, 1), None);
        assert_eq!(found.is_ok(), wrong == "1e14 ", "{wrong}");
    }
}

#[test]
fn numbers_of_tokens_have_a_limit() {
    for name in ["input_length", "output_length"] {
        let field = if name == "input_length" { "700" } else { "5," };
        let bad =
            GOOD.replacen(field, if name == "input_length" { "16777217" } else { "16777217," }, 1);
        let said = read_text(&bad, None).unwrap_err().to_string();
        assert!(said.contains(&format!("field `{name}`: expected at most 16,777,216")), "{said}");
    }
}

#[test]
fn a_trace_of_sessions_is_named() {
    let first = GOOD.replace("{\"timestamp\"", "{\"session_id\": \"a\", \"timestamp\"");
    let next = first.replace("\"timestamp\": 0", "\"delay\": 2000.0");
    let problem = read_text(&format!("{first}\n{next}\n"), None).unwrap_err();
    assert!(problem.to_string().ends_with(":2: field `timestamp` is missing"), "{problem}");
    assert!(problem.hint().contains("trace of sessions"), "{}", problem.hint());
}

#[test]
fn what_is_wrong_is_named() {
    for (old, new, wanted) in [
        ("\"hash_ids\": [0, 1]", "\"x\": 1", "field `hash_ids` is missing"),
        ("\"input_length\": 700, ", "", "field `input_length` is missing"),
        ("\"timestamp\": 0, ", "", "field `timestamp` is missing"),
        ("\"output_length\": 5, ", "", "field `output_length` is missing"),
        (
            "\"timestamp\": 0",
            "\"timestamp\": \"now\"",
            "field `timestamp`: invalid type: string \"now\", expected f64",
        ),
        ("\"timestamp\": 0", "\"timestamp\": -1", "`timestamp`: expected milliseconds, from 0"),
        ("\"timestamp\": 0", "\"timestamp\": 1e300", "`timestamp`: expected milliseconds, from 0"),
        ("700", "-700", "field `input_length`: invalid value: integer `-700`, expected u64"),
        ("700", "700.5", "floating point `700.5`, expected u64"),
        (
            "[0, 1]",
            "\"0 1\"",
            "field `hash_ids`: invalid type: string \"0 1\", expected a sequence",
        ),
        ("[0, 1]", "[0, -1]", "field `hash_ids`: invalid value: integer `-1`"),
        ("[0, 1]", "[0, null]", "invalid type: null, expected u64"),
        ("[0, 1]}", "[0, 1]", "not a JSON object: EOF while parsing"),
    ] {
        let bad = GOOD.replace(old, new);
        assert_ne!(bad, GOOD);
        let problem = read_text(&format!("{GOOD}\n{bad}\n"), None).unwrap_err().to_string();
        assert!(problem.contains(":2: ") && problem.contains(wanted), "{problem}");
    }
    let csv = read_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,4808\n", None).unwrap_err();
    assert!(csv.to_string().contains(":1: ") && csv.hint().contains("a CSV says"), "{csv}");
    let problem = read_text("[1]\n", None).unwrap_err().to_string();
    assert!(problem.ends_with(":1: expected a JSON object"), "{problem}");
}

#[test]
fn nothing_to_replay_is_an_error() {
    assert!(read_text("", None).unwrap_err().to_string().contains("holds no request"));
    assert!(read_text("\n \n", None).unwrap_err().to_string().contains("holds no request"));
    let problem = read(Path::new("/no/such/trace"), None).unwrap_err().to_string();
    assert!(problem.contains("/no/such/trace") && problem.contains("No such file"));
    for (path, wanted) in [("/", "it is a directory"), ("/dev/zero", "it is a device")] {
        let problem = read(Path::new(path), None).unwrap_err().to_string();
        assert!(problem.contains("cannot be read") && problem.contains(wanted), "{problem}");
    }
}

#[test]
fn what_is_compressed_or_has_no_lines_is_named() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"\x1f\x8b\x08\x00 and so on\n").unwrap();
    let problem = read(file.path(), None).unwrap_err();
    assert!(problem.to_string().contains("compressed"), "{problem}");
    assert!(problem.hint().contains("zcat /"), "{}", problem.hint());
    file.as_file().set_len(0).unwrap();
    file.as_file().set_len(LINE_BYTES_MAX + 1).unwrap();
    let problem = read(file.path(), None).unwrap_err().to_string();
    assert!(problem.ends_with(":1: the line is longer than 16 MiB"), "{problem}");
}
