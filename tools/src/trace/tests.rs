use std::io::Write;

use super::*;

const GOOD: &str =
    r#"{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}"#;

fn read_trace(text: &str, limit: Option<usize>) -> Result<Trace, Problem> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    read(file.path(), limit)
}

fn read_text(text: &str, limit: Option<usize>) -> Result<Vec<Request>, Problem> {
    read_trace(text, limit).map(|trace| trace.requests)
}

#[test]
fn requests_are_read() {
    let more = GOOD.replace("[0, 1]", "[7, 18446744073709551615], \"extra\": {\"a\": [1]}");
    let requests = read_text(&format!("{GOOD}\n\n{more}\r\n"), None).unwrap();
    assert_eq!(requests.len(), 2);
    let hash_ids = [0, 1].into();
    let first = Request { input_tokens: 700, output_tokens: 5, hash_ids, ..Request::default() };
    assert_eq!(requests[0], first);
    assert_eq!(*requests[1].hash_ids, [7, u64::MAX]);
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
        (668, 42, "42 `hash_ids`", "blocks of 16 tokens? Then each line needs \"block_size\": 16"),
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
    assert_eq!(arrivals, [0, 500, 2000], "in order");
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
    assert!(csv.to_string().contains(":1: ") && csv.hint().contains("GeneratedTokens"), "{csv}");
    let problem = read_text("[1]\n", None).unwrap_err().to_string();
    assert!(problem.ends_with(": element 1: expected a JSON object"), "{problem}");
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
    file.as_file().set_len(ITEM_BYTES_MAX as u64 + 1).unwrap();
    let problem = read(file.path(), None).unwrap_err().to_string();
    assert!(problem.ends_with(":1: the line is longer than 64 MiB"), "{problem}");
}

/// Returns the IDs of a prompt's blocks.
fn ids(request: &Request) -> Vec<u64> {
    request.ids().collect()
}

/// Returns how many leading blocks of a request are those of another one.
fn shared(one: &Request, other: &Request) -> usize {
    ids(one).iter().zip(ids(other)).take_while(|(one, other)| **one == *other).count()
}

fn seconds(requests: &[Request]) -> Vec<f64> {
    requests.iter().map(|request| request.arrival.as_secs_f64()).collect()
}

fn says(trace: &Trace, what: &str) {
    assert!(trace.notes.iter().any(|note| note.contains(what)), "{what}: {:?}", trace.notes);
}

#[test]
fn bailians_chats_have_blocks_of_16_tokens_and_seconds() {
    let line = |chat: i64, parent: i64, time: f64, tokens: u64, first: u64| {
        let ids: Vec<u64> = (first..first + tokens.div_ceil(16)).collect();
        format!(
            "{{\"chat_id\": {chat}, \"parent_chat_id\": {parent}, \"timestamp\": {time}, \
             \"input_length\": {tokens}, \"output_length\": 132, \"type\": \"text\", \
             \"turn\": 1, \"hash_ids\": {ids:?}}}\n"
        )
    };
    let text = line(55, -1, 10.5, 320, 0) + &line(7, -1, 61.114, 521, 100);
    let trace = read_trace(&(text + &line(159, 55, 70.5, 700, 0)), None).unwrap();
    let [first, other, next] = &trace.requests[..] else { panic!("{trace:?}") };
    assert_eq!((first.block_tokens, ids(first).len(), ids(other).len()), (16, 20, 33));
    assert_eq!(seconds(&trace.requests), [0.0, 50.614, 60.0]);
    assert_eq!((next.after, first.after), (Some((0, Duration::ZERO)), None));
    assert_eq!((shared(first, next), shared(first, other)), (20, 0));
    says(&trace, "blocks of 16 tokens, times in seconds");
    says(&trace, "1 of 3 requests are later turns");
    let wrong = read_text(&line(1, -1, 0.0, 320, 0).replace("320", "321"), None).unwrap_err();
    assert!(wrong.to_string().contains("for each block of 16 tokens"), "{wrong}");
}

/// As `aiperf synthesize agentic-code` of aiperf 0.13 writes it: a turn's line has what it adds.
const SESSIONS: &str = r#"
{"session_id":"a","input_length":1100,"output_length":300,"hash_ids":[0,1,2],"timestamp":500.5}
{"session_id":"a","input_length":700,"output_length":40,"hash_ids":[3,4],"delay":2500.0}
{"session_id":"a","input_length":60,"output_length":9,"hash_ids":[5],"delay":1000.0}
{"session_id":"b","input_length":1600,"output_length":10,"hash_ids":[0,1,6,7],"timestamp":1500.5}
"#;

#[test]
fn turns_of_aiperfs_sessions_repeat_what_was_said() {
    let trace = read_trace(SESSIONS, None).unwrap();
    let [first, other, second, third] = &trace.requests[..] else { panic!("{trace:?}") };
    let lengths = [first, second, third].map(|it| it.input_tokens);
    assert_eq!(lengths, [1100, 1100 + 300 + 700, 2100 + 40 + 60]);
    // The earliest times: answers take time in addition.
    assert_eq!(seconds(&trace.requests), [0.0, 1.0, 2.5, 3.5]);
    assert_eq!(second.after, Some((0, Duration::from_millis(2500))));
    assert_eq!(third.after, Some((2, Duration::from_secs(1))));
    // Blocks that are not full are others when they are.
    let found = [shared(first, second), shared(second, third), shared(first, other)];
    assert_eq!(found, [2, 4, 2]);
    assert_eq!(shared(other, third), 2);
    says(&trace, "what its turn adds");
    assert!(trace.has_starts);
    // Lines that repeat the session's first block have the whole prompt.
    let whole = SESSIONS.replace(":700,", ":1700,").replace("[3,4]", "[0,1,8,9]");
    let whole = read_text(&whole, None).unwrap();
    assert_eq!((whole[2].input_tokens, shared(&whole[0], &whole[2])), (1700, 2));
    assert_eq!(whole[2].after, Some((0, Duration::from_millis(2500))));
    // A limit cuts a session.
    assert_eq!(read_text(SESSIONS, Some(2)).unwrap().len(), 2);
}

#[test]
fn what_a_line_lacks_all_may_lack() {
    let no_times =
        SESSIONS.replace(",\"timestamp\":500.5", "").replace(",\"timestamp\":1500.5", "");
    let trace = read_trace(&no_times, None).unwrap();
    assert!(!trace.has_starts);
    says(&trace, "does not say when its sessions begin");
    assert_eq!(seconds(&trace.requests), [0.0, 0.0, 2.5, 3.5]);
    let later = read_text(&no_times.replace("\"b\",", "\"b\",\"timestamp\":5,"), None);
    assert!(later.unwrap_err().to_string().contains(":5: field `timestamp`: the first line has"));
    let lengths = "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 4}\n".repeat(2);
    let trace = read_trace(&lengths, None).unwrap();
    says(&trace, "not what they share");
    assert_eq!(shared(&trace.requests[0], &trace.requests[1]), 0);
}

#[test]
fn a_block_size_of_the_lines_counts() {
    let small = "{\"timestamp\": 0, \"input_length\": 130, \"output_length\": 4, \
                 \"block_size\": 64, \"hash_ids\": [1, 2, 3]}\n";
    assert_eq!(read_text(small, None).unwrap()[0].block_tokens, 64);
    for wrong in ["0", "65537"] {
        let said = read_text(&small.replace("64", wrong), None).unwrap_err().to_string();
        assert!(said.contains("field `block_size`: expected 1 to 65536"), "{said}");
    }
}

/// A conversation as aiperf 0.13 reads it (`weka_trace`): a sub-agent works between two requests.
const WEKA: &str = r#"{
  "id": "one", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
  "requests": [
    {"t": 3.0, "type": "n", "model": "m", "in": 640, "out": 50,
     "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "api_time": 2.0},
    {"t": 6.0, "type": "subagent", "agent_id": "agent_001", "subagent_type": "Explore",
     "status": "completed", "duration_ms": 8000, "models": ["m"],
     "requests": [
      {"t": 6.5, "type": "s", "model": "m", "in": 200, "out": 20,
       "hash_ids": [20, 21, 22], "api_time": 1.5, "ttft": 0.2},
      {"t": 9.0, "type": "n", "model": "m", "in": 300, "out": 20,
       "hash_ids": [20, 21, 22, 23], "api_time": 5.0}]},
    {"t": 15.0, "type": "n", "model": "m", "in": 800, "out": 10,
     "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], "api_time": 1.0}
  ]}
"#;

#[test]
fn agents_wait_for_what_they_started() {
    let trace = read_trace(WEKA, None).unwrap();
    let [first, inner, deeper, last] = &trace.requests[..] else { panic!("{trace:?}") };
    let ms = Duration::from_millis;
    let after = [first, inner, deeper, last].map(|it| it.after);
    // From 5.0 to 6.5, from 8.0 to 9.0, and from 14.0 to 15.0.
    assert_eq!(after, [None, Some((0, ms(1500))), Some((1, ms(1000))), Some((2, ms(1000)))]);
    assert_eq!((shared(first, last), shared(inner, deeper), shared(first, inner)), (10, 3, 0));
    // The trace has 12 IDs for 13 blocks.
    assert_eq!((ids(last).len(), first.block_tokens, trace.has_starts), (13, 64, false));
    // Another conversation has other blocks, in any layout of the file.
    let line = WEKA.replace('\n', " ");
    for both in
        [WEKA.repeat(2), format!("{line}\n{line}"), line.repeat(2), format!("[{line}, {line}]")]
    {
        let requests = read_text(&both, None).unwrap();
        let firsts: Vec<&Request> = requests.iter().filter(|it| it.after.is_none()).collect();
        assert_eq!((requests.len(), firsts.len()), (8, 2), "{both}");
        assert_eq!(shared(firsts[0], firsts[1]), 0);
    }
    assert_eq!(read_text(WEKA, Some(2)).unwrap().len(), 2);
    // Sub-agents may count from their own start, and end after the next request came.
    let own = WEKA.replace("\"t\": 6.5", "\"t\": 0.5").replace("\"t\": 9.0", "\"t\": 3.0");
    assert_eq!(read_text(&own, None).unwrap()[1].after, Some((0, ms(1500))));
    let async_one = read_text(&WEKA.replace("5.0}]", "50.0}]"), None).unwrap();
    assert!(async_one.iter().any(|it| it.input_tokens == 800 && it.after == Some((0, ms(10_000)))));
    let many = WEKA.replace("\"in\": 640", "\"in\": 64");
    assert!(read_text(&many, None).unwrap_err().to_string().contains("10 `hash_ids`"));
    let broken = read_text(WEKA.trim_end().trim_end_matches('}'), None).unwrap_err().to_string();
    assert!(broken.contains(": object 1: ") && broken.contains("EOF"), "{broken}");
}

#[test]
fn conversations_of_sharegpt_share_their_text() {
    let (question, answer) = ("What is a block? ".repeat(16), "A file of all layers. ".repeat(8));
    let talk = |more: &str| {
        format!(
            r#"{{"id": "x", "conversations": [
                {{"from": "human", "value": "{question}"}}, {{"from": "gpt", "value": "{answer}"}},
                {{"from": "human", "value": "{more}"}}, {{"from": "gpt", "value": "{more}"}}]}}"#
        )
    };
    let trace = read_trace(&format!("[{}, {}]", talk("Why?"), talk("Who?")), None).unwrap();
    let [first, second, other, _] = &trace.requests[..] else { panic!("{trace:?}") };
    assert_eq!((first.input_tokens, first.output_tokens), (272 / 4, 176 / 4));
    assert_eq!(second.input_tokens, (272 + 176 + 4) / 4);
    assert_eq!((second.after, other.after), (Some((0, Duration::ZERO)), None));
    assert_eq!((shared(first, second), shared(first, other)), (68 / 16, 68 / 16));
    says(&trace, "4 bytes of text");
    let wrong = read_text("[{\"conversations\": [{\"from\": 1}]}]", None).unwrap_err().to_string();
    assert!(wrong.contains(": element 1: invalid type"), "{wrong}");
}

#[test]
fn tables_of_azure_and_burstgpt_have_lengths_only() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                 2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n";
    let trace = read_trace(azure, None).unwrap();
    let lengths: Vec<_> =
        trace.requests.iter().map(|it| (it.input_tokens, it.output_tokens)).collect();
    assert_eq!(lengths, [(374, 44), (396, 109)]);
    assert!((trace.requests[1].arrival.as_secs_f64() - 4.314_579).abs() < 1e-6);
    assert_eq!(shared(&trace.requests[0], &trace.requests[1]), 0);
    says(&trace, "not what they share");
    // 2024's dates have an offset, and none a fraction.
    let later = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.001163+00:00,1452,3\n\
                 2024-05-12 00:01:00+00:00,584,3\n";
    assert!((seconds(&read_text(later, None).unwrap())[1] - 59.998_837).abs() < 1e-6);
    let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                 5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n\
                 118,GPT-4,417,276,693,Conversation log\n";
    let trace = read_trace(burst, None).unwrap();
    assert_eq!(seconds(&trace.requests), [0.0, 113.0]);
    says(&trace, "1 rows without tokens are left out");
    for (text, wanted) in [
        (
            azure.replace("374", "-1"),
            ":2: ContextTokens: expected a number of tokens, found \"-1\"",
        ),
        (azure.replace(",109", ""), ":3: GeneratedTokens: expected a number"),
        (azure.replace("2023-11-16 18:15:50", "16.11.2023"), ":3: TIMESTAMP: expected a date"),
        (burst.replace("118", "later"), ":4: Timestamp: expected seconds"),
        (burst.replace("417", "16777217"), "Request tokens: expected at most 16,777,216 tokens"),
    ] {
        let said = read_text(&text, None).unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn seconds_that_are_taken_for_milliseconds_are_noticed() {
    let lines = |every: f64| -> String {
        (0..20).map(|at| line(&format!("{}", f64::from(at) * every), 5, 1)).collect()
    };
    let problem = read_trace(&lines(0.916), None).unwrap_err();
    let said = problem.to_string();
    assert!(said.contains("20 requests in 0.02 s") && said.contains("1092 a second"), "{said}");
    assert!(problem.hint().contains("by 1,000"), "{}", problem.hint());
    // Whole numbers may be many machines; fractions are written by aiperf.
    says(&read_trace(&lines(1.0), None).unwrap(), "1000 a second, which no GPU serves");
    for fine in [100.5, 1000.0] {
        assert!(read_trace(&lines(fine), None).unwrap().notes.is_empty());
    }
}

#[test]
fn prompts_are_cut_into_blocks_of_any_size() {
    let request = |tokens: u64, block_tokens: u32| Request {
        input_tokens: tokens,
        block_tokens,
        hash_ids: (1..=tokens.div_ceil(block_tokens.into())).collect(),
        ..Request::default()
    };
    let cut = |request: &Request, tokens: u32, count: u64| {
        let mut all = Vec::new();
        request.cut(tokens, count, |ids, part| all.push((ids.to_vec(), part)));
        all
    };
    let large = request(700, 512);
    assert_eq!((large.padded(256), large.padded(100)), (4, 11));
    let ids = [(vec![1], 0), (vec![], 1), (vec![2], 0), (vec![], 1)];
    assert_eq!(cut(&large, 256, 4), ids);
    let small = request(100, 16);
    assert_eq!(small.padded(64), 2);
    assert_eq!(cut(&small, 64, 2), [(vec![1, 2, 3, 4], 0), (vec![5, 6, 7], 0)]);
    // A block of 24 tokens ends in the second one of 16.
    assert_eq!(cut(&small, 24, 3), [(vec![1, 2], 0), (vec![3], 0), (vec![4, 5], 0)]);
}
