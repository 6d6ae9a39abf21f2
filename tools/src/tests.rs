//! Edits of files that people and engines write.
//!
//! A file is refused with a message that names it, or read. The values that were read are then used
//! as far as that is cheap, so that numbers that later code cannot work with are found here.

use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bolero::{TypeGenerator, check};
use clap::Parser;
use kv_schedule::{Curve, IoCosts, Setting, SlackTable, StepShape};
use nvme_emu::{Emu, EmuDomain};
use ripieno_stack::{StoreDir, StoreDirMedia, StoreDirOptions};
use tempfile::TempDir;

use crate::layer_times;
use crate::model::{MODELS, Shape};
use crate::plan::Plan;
use crate::sim::workload::{Workload, WorkloadFlags};
use crate::trace;

const TRACE: &str = r#"{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 27.5, "input_length": 1024, "output_length": 0, "hash_ids": [1, 3]}
{"timestamp": 3000, "input_length": 512, "output_length": 900, "hash_ids": [7]}
"#;

/// Other forms of traces.
const FORMS: [&str; 6] = [
    r#"
{"chat_id":5,"parent_chat_id":-1,"timestamp":1,"input_length":9,"output_length":3,"hash_ids":[1]}
{"chat_id":6,"parent_chat_id":5,"timestamp":9,"input_length":20,"output_length":3,"hash_ids":[1,2]}
"#,
    r#"{"session_id":"a","input_length":1100,"output_length":3,"hash_ids":[0,1,2],"timestamp":5}
{"session_id": "a", "input_length": 700, "output_length": 40, "hash_ids": [3, 4], "delay": 2500.0}
{"session_id": "a", "input_length": 600, "output_length": 40, "hash_ids": [0, 4], "delay": 25}
"#,
    r#"{"id": "w", "block_size": 64, "hash_id_scope": "local", "requests": [
{"t": 3.0, "type": "n", "in": 100, "out": 50, "hash_ids": [1, 2], "api_time": 2.0},
{"t": 6.0, "type": "subagent", "requests": [
{"t": 6.5, "type": "s", "in": 70, "out": 20, "hash_ids": [9], "api_time": 1.5}]},
{"t": 15.0, "type": "n", "in": 180, "out": 10, "hash_ids": [1, 2, 3], "api_time": 1.0}]}
"#,
    r#"[{"id": "x", "conversations": [{"from": "human", "value": "What is a block of a store?"},
{"from": "gpt", "value": "A file of all layers, as long as a few tokens."},
{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "It is so."}]}]
"#,
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n\
     2024-05-12 00:00:00+00:00,396,109\n",
    "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45.5,GPT-4,1087,0\n",
];

const LAYER_TIMES: &str = r#"{"ripieno_layer_times":1,"model":"m","gpu":"g","engine":"e"}
{"requests":[[512,0],[1,700]],"layer_us":812.5}
{"requests":[[1,701]],"layer_us":90}
{"ripieno_layer_times":1,"model":"m","gpu":"g","engine":"e"}
{"requests":[[2048,4096]],"layer_us":3300}
"#;

/// Replacements of a number.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "-0.0",
    "0.5",
    "1e-400",
    "1e9",
    "1e18",
    "1e300",
    "1e999",
    "4294967295",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "[]",
];
/// Replacements of a name.
const NAMES: [&str; 4] = ["making", "device-0.img", "device-1.img", "requests"];

#[derive(Debug, Clone, Copy)]
enum Kind {
    Trace,
    LayerTimes,
    Slack,
    StoreDir,
}

impl Kind {
    /// The last one takes longest.
    fn of(number: u8) -> Self {
        match number {
            0..90 => Self::Trace,
            90..160 => Self::LayerTimes,
            160..230 => Self::Slack,
            _ => Self::StoreDir,
        }
    }
}

#[derive(Debug, TypeGenerator)]
struct Edit {
    /// The word or mark that it begins at.
    at: u16,
    what: What,
}

#[derive(Debug, TypeGenerator)]
enum What {
    Number(u8),
    /// With any number of digits.
    Digits {
        value: u64,
        shift: u8,
    },
    Name(u8),
    Bytes(Vec<u8>),
    Remove(u8),
    Repeat(u8),
}

#[derive(Debug, TypeGenerator)]
struct Input {
    kind: u8,
    /// Few, or little of what the file says is still good.
    count: u8,
    edits: Vec<Edit>,
}

/// Words, and single marks between them.
fn pieces(text: &str) -> Vec<Vec<u8>> {
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    let mut in_word = false;
    for byte in text.bytes() {
        let is_word = byte.is_ascii_alphanumeric() || b"_.+-".contains(&byte);
        match pieces.last_mut() {
            Some(word) if is_word && in_word => word.push(byte),
            _ => pieces.push(vec![byte]),
        }
        in_word = is_word;
    }
    pieces
}

/// Puts `text` in place of a piece that begins with such a letter.
fn replace(pieces: &mut [Vec<u8>], at: u16, of: fn(&u8) -> bool, text: &str) {
    let mut fitting: Vec<_> = pieces.iter_mut().filter(|piece| of(&piece[0])).collect();
    if !fitting.is_empty() {
        let at = usize::from(at) % fitting.len();
        *fitting[at] = text.into();
    }
}

fn edit(text: &str, edits: &[Edit]) -> Vec<u8> {
    let mut pieces = pieces(text);
    for Edit { at, what } in edits {
        let place = usize::from(*at) % pieces.len();
        let end = |count: u8, len: usize| (place + 1 + usize::from(count % 32)).min(len);
        match what {
            What::Number(number) => {
                let text = NUMBERS[usize::from(*number) % NUMBERS.len()];
                replace(&mut pieces, *at, u8::is_ascii_digit, text);
            }
            What::Digits { value, shift } => {
                let text = (value >> (shift % 64)).to_string();
                replace(&mut pieces, *at, u8::is_ascii_digit, &text);
            }
            What::Name(name) => {
                let text = NAMES[usize::from(*name) % NAMES.len()];
                replace(&mut pieces, *at, u8::is_ascii_alphabetic, text);
            }
            What::Bytes(bytes) if bytes.is_empty() => {}
            What::Bytes(bytes) => pieces[place].clone_from(bytes),
            What::Remove(count) => {
                // One stays.
                let end = end(*count, pieces.len() - 1);
                drop(pieces.drain(place.min(end)..end));
            }
            What::Repeat(count) => {
                let again = pieces[place..end(*count, pieces.len())].to_vec();
                drop(pieces.splice(place..place, again));
            }
        }
    }
    pieces.concat()
}

fn slack() -> SlackTable {
    let names = ["m", "g", "e"].map(str::to_owned);
    let ([model, gpu, engine], drives) = (names, vec!["d".to_owned()]);
    let points = [(4096, Duration::from_micros(80)), (1 << 20, Duration::from_micros(300))];
    let curve = || Curve::new(&points).unwrap();
    let costs = IoCosts { read: curve(), write: curve(), mixed: 1.2 };
    let mut table = SlackTable::new(Setting { model, gpu, engine, drives }, costs);
    for requests in [vec![(512, 0), (1, 700)], vec![(1, 701)], vec![(2048, 4096)]] {
        table.learn(StepShape::of(requests), Duration::from_micros(800));
    }
    table
}

/// A store directory whose parameters are edited in place.
struct Files {
    place: TempDir,
    store_dir: String,
    slack: String,
}

static FILES: LazyLock<Files> = LazyLock::new(|| {
    let place = tempfile::tempdir().unwrap();
    let media = StoreDirMedia::Files { count: 2, bytes: 2 << 20 };
    let options = StoreDirOptions { id: 7, media, lba_bytes: 4096 };
    let mut store_dir = StoreDir::create(&place.path().join("store"), &options).unwrap();
    // One that is not ready is removed.
    store_dir.set_ready().unwrap();
    drop(store_dir);
    let store_dir = fs::read_to_string(place.path().join("store/home.json")).unwrap();
    Files { place, store_dir, slack: slack().to_json() }
});

fn named<T, E: ToString>(result: Result<T, E>, path: &Path) -> Option<T> {
    let name = path.display().to_string();
    let refused = |error: E| {
        let why = error.to_string();
        assert!(why.contains(&name), "{name} is not in: {why}");
    };
    result.map_err(refused).ok()
}

/// Flags of a simulation.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    workload: WorkloadFlags,
}

fn check_trace(path: &Path) {
    let bytes = fs::read(path).unwrap().len();
    if let Some(trace::Trace { requests, .. }) = named(trace::read(path, None), path) {
        assert!(requests.len() <= bytes, "{} requests in {bytes} bytes", requests.len());
        assert!(requests.is_sorted_by_key(|request| request.arrival));
        for (at, request) in requests.iter().enumerate() {
            assert!(request.after.is_none_or(|(before, _)| before < at), "{request:?}");
        }
        let padded: u64 = requests.iter().map(|request| request.padded(128)).sum();
        // Memory follows from what is asked for, which the commands check.
        if padded > 1 << 16 {
            return;
        }
        let shape = Shape::new(&MODELS[0], 128).unwrap();
        let plan = Plan::new(requests.into_iter(), &shape, None);
        assert_eq!((0..plan.requests()).map(|at| plan.keys(at).len() as u64).sum::<u64>(), padded);
        assert!(plan.ideal_hits * plan.subs as u64 + plan.distinct >= plan.longest as u64);
    }
    for rate in [&["sim"][..], &["sim", "--rate", "0.5"]] {
        let flags = Flags::parse_from(rate).workload;
        let read = Workload::read(path.to_str().unwrap(), &flags, 1, 128);
        // The rate is the flag's fault, and named in its place.
        let Ok(workload) = read else { continue };
        assert!(workload.counted.requests.is_sorted_by_key(|request| request.arrival));
        let blocks = |it: &ripieno_sim::Request| it.blocks.len() as u64 * 128 <= it.input.into();
        assert!(workload.counted.requests.iter().all(blocks), "more blocks than tokens");
    }
}

fn check_table(path: &Path) {
    let Some(table) = named(layer_times::table("--layers", path), path) else { return };
    for (input, prefix) in [(1, 0), (1, 1 << 29), (512, 700), (1 << 29, 1 << 29)] {
        let shape = StepShape::of([(input, prefix)]);
        let time = table.layer(shape);
        assert_eq!(time.is_some(), table.fit(shape).is_some());
        assert_ne!(time, Some(Duration::ZERO), "no time at all for {input} and {prefix}");
    }
    SlackTable::parse(&table.to_json()).expect("what was read can be written and read");
}

fn check_store_dir(dir: &Path) {
    if let Some(store_dir) = named(StoreDir::open(dir), dir) {
        assert!(store_dir.is_ready());
        if let Ok((controllers, _)) = store_dir.controllers() {
            let domain = EmuDomain::new("store");
            let made = controllers.into_iter().map(|it| Emu::new(Arc::clone(&domain), it));
            made.for_each(drop);
        }
    }
    // It would be made anew, and then it is no longer what was edited.
    if StoreDir::exists(dir) {
        let media = StoreDirMedia::Files { count: 3, bytes: 3 << 20 };
        let other = StoreDirOptions { id: 8, media, lba_bytes: 512 };
        let opened = StoreDir::open_or_create(dir, &other);
        assert!(!opened.is_ok_and(|store_dir| store_dir.devices().len() != 3), "of another size");
    }
}

#[test]
fn texts() {
    check!(name = "texts").with_type::<Input>().with_iterations(300).for_each(|input| {
        let Files { place, store_dir, slack } = &*FILES;
        let (dir, file) = (place.path().join("store"), place.path().join("file"));
        let kind = Kind::of(input.kind);
        let (good, path) = match kind {
            Kind::Trace => match usize::from(input.kind) {
                number if number < FORMS.len() * 8 => (FORMS[number / 8], &file),
                _ => (TRACE, &file),
            },
            Kind::LayerTimes => (LAYER_TIMES, &file),
            Kind::Slack => (slack.as_str(), &file),
            Kind::StoreDir => (store_dir.as_str(), &dir.join("home.json")),
        };
        let edits = &input.edits[..input.edits.len().min(1 + usize::from(input.count % 4))];
        fs::write(path, edit(good, edits)).unwrap();
        match kind {
            Kind::Trace => check_trace(&file),
            Kind::LayerTimes | Kind::Slack => check_table(&file),
            Kind::StoreDir => check_store_dir(&dir),
        }
    });
}

#[test]
fn what_is_edited_is_good() {
    let Files { place, store_dir, slack } = &*FILES;
    let file = place.path().join("good");
    fs::write(&file, TRACE).unwrap();
    assert_eq!(trace::read(&file, None).unwrap().requests.len(), 3);
    for (good, requests) in FORMS.into_iter().zip([2, 3, 3, 2, 2, 1]) {
        fs::write(&file, good).unwrap();
        assert_eq!(trace::read(&file, None).unwrap().requests.len(), requests, "{good}");
    }
    for good in [LAYER_TIMES, slack] {
        fs::write(&file, good).unwrap();
        assert!(!layer_times::table("--layers", &file).unwrap().is_empty());
    }
    for good in [TRACE, LAYER_TIMES, slack, store_dir] {
        assert_eq!(edit(good, &[]), good.as_bytes());
    }
}
