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
    assert!(!requests[0].is_uneven());
    assert_eq!(read_text(&format!("{GOOD}\n{more}"), Some(1)).unwrap().len(), 1);
    // Lines after the limit are not read.
    assert_eq!(read_text(&format!("{GOOD}\nnonsense"), Some(1)).unwrap().len(), 1);
}

#[test]
fn prompts_of_another_length_are_noticed() {
    for (tokens, ids, uneven) in
        [(0, 0, false), (1, 1, false), (512, 1, false), (513, 1, true), (5, 0, true)]
    {
        let (arrival, hash_ids) = (Duration::ZERO, vec![0; ids]);
        let request = Request { arrival, input_tokens: tokens, output_tokens: 1, hash_ids };
        assert_eq!(request.is_uneven(), uneven, "{tokens} tokens, {ids} ids");
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (old, new, wanted) in [
        ("\"hash_ids\": [0, 1]", "\"x\": 1", "field `hash_ids` is missing"),
        ("\"input_length\": 700, ", "", "field `input_length` is missing"),
        ("\"timestamp\": 0, ", "", "field `timestamp` is missing"),
        ("\"output_length\": 5, ", "", "field `output_length` is missing"),
        ("\"timestamp\": 0", "\"timestamp\": \"now\"", "found the string \"now\""),
        (
            "700",
            "-700",
            "field `input_length`: expected a whole number, zero or more, found \
            the negative number -700",
        ),
        ("700", "700.5", "found the number 700.5"),
        ("[0, 1]", "\"0 1\"", "field `hash_ids`: expected a list of block ids, found the"),
        ("[0, 1]", "[0, -1]", "field `hash_ids[1]`"),
        ("[0, 1]", "[0, null]", "found null"),
        ("[0, 1]}", "[0, 1]", "not a JSON object: EOF while parsing"),
    ] {
        let bad = GOOD.replace(old, new);
        assert_ne!(bad, GOOD);
        let problem = read_text(&format!("{GOOD}\n{bad}\n"), None).unwrap_err().to_string();
        assert!(problem.contains(":2: ") && problem.contains(wanted), "{problem}");
    }
    let problem = read_text("[1]\n", None).unwrap_err().to_string();
    assert!(problem.ends_with(":1: expected a JSON object, found a list"), "{problem}");
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
