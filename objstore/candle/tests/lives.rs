//! Restarts of the engine, each in its own process: after a kill, and with a damaged store.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Command, Stdio},
};

use ripieno_candle::{Engine, SHAPE};
use ripieno_stack::StackConfig;

/// Tokens of the prompt: 18 blocks and 12 tokens.
const TOKENS: usize = 300;

fn prompt() -> String {
    (0..TOKENS).map(|at| char::from(b'a' + (at * at / 7 % 26) as u8)).collect()
}

/// Returns the same prompt, except for the token at a position.
fn other_prompt(at: usize) -> String {
    let mut prompt = prompt();
    prompt.replace_range(at..=at, "!");
    prompt
}

fn engine(dir: &Path, prompt: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno-candle"));
    // Threads that wait for each other are slow on a busy machine.
    command.env("RAYON_NUM_THREADS", "1");
    command.arg("--path").arg(dir).args(["--prompt", prompt, "--tokens", "24"]);
    command
}

/// Runs the engine once. Returns the number of tokens found, and the answer, which the engine
/// compared with the one that it computed without the store.
fn live(dir: &Path, prompt: &str) -> (usize, String) {
    let output = engine(dir, prompt).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{wrong}");
    let line = |name| said.lines().find_map(|line| line.strip_prefix(name)).unwrap().to_owned();
    let found = line("found: ").split(' ').next().unwrap().parse().unwrap();
    (found, line("tokens: "))
}

#[test]
fn a_second_life_goes_on_with_what_a_killed_one_stored() {
    let place = tempfile::tempdir().unwrap();
    let (_, expected) = live(&place.path().join("fresh"), &prompt());

    let dir = place.path().join("kv");
    let mut first = engine(&dir, &prompt()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "found: 0 of 300 tokens");
    assert_eq!(lines.next().unwrap().unwrap(), "stored: 288 tokens");
    first.kill().unwrap();
    assert_eq!(first.wait().unwrap().signal(), Some(9), "it was still decoding");

    assert_eq!(live(&dir, &prompt()), (288, expected.clone()));
    // The answer depends on the first token: KV that was found is used, and must be right.
    let (found, other) = live(&dir, &other_prompt(0));
    assert_eq!(found, 0);
    assert_ne!(other, expected);
    assert_eq!(live(&dir, &other_prompt(165)).0, 160, "ten blocks begin alike");
}

#[test]
fn damaged_kv_is_computed_again() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("kv");
    let (_, expected) = live(&dir, &prompt());

    // The sixth block's K in the third layer.
    let tokens: Vec<u32> = prompt().bytes().map(u32::from).collect();
    let engine = Engine::open(StackConfig::at(&dir), false).unwrap();
    let sequence = engine.prefill(&tokens, true).unwrap();
    let k = engine.pages.read((2, 0), &sequence.table, 96).unwrap();
    engine.close().unwrap();
    let k = k.narrow(0, 80, 16).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let page: Vec<u8> = k.iter().flat_map(|element| element.to_le_bytes()).collect();
    assert_eq!(page.len(), SHAPE.object_bytes as usize);

    let mut damaged = 0;
    for device in ["device-0.img", "device-1.img"] {
        let path = dir.join(device);
        let mut image = fs::read(&path).unwrap();
        for object in image.chunks_exact_mut(page.len()).filter(|object| *object == page) {
            // Values that a model could have computed.
            object.fill(0x3F);
            damaged += 1;
        }
        fs::write(&path, image).unwrap();
    }
    assert_eq!(damaged, 1);

    assert_eq!(live(&dir, &prompt()), (80, expected.clone()), "what is before it is found");
    assert_eq!(live(&dir, &prompt()), (288, expected), "and it was stored again");
}

#[test]
fn a_few_blocks_from_the_store_answer_as_from_memory() {
    let place = tempfile::tempdir().unwrap();
    let output = engine(place.path(), &prompt()).args(["--top", "4", "--room", "2"]).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let read = said.lines().find_map(|line| line.strip_prefix("read: ")).unwrap();
    let blocks: u64 = read.split(' ').next().unwrap().parse().unwrap();
    // 23 tokens, 4 layers; a block is two objects.
    assert!((1..23 * 4 * 4).contains(&blocks), "{read}");
    let bytes = blocks * 2 * u64::from(SHAPE.object_bytes);
    assert!(read.ends_with(&format!(" {bytes} bytes")), "{read}");
}

#[test]
fn a_model_with_windows_finds_what_an_earlier_life_stored() {
    let place = tempfile::tempdir().unwrap();
    for found in [0, 288] {
        let output = engine(place.path(), &prompt()).arg("--windows").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.starts_with(&format!("found: {found} of 300 tokens")), "{said}");
    }
}
