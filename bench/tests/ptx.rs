//! Checks that the committed PTX matches its sources, without a compiler.

use std::{fs, path::Path};

use xxhash_rust::xxh3::xxh3_128;

const SOURCES: &str = include_str!("../ptx/bench_gpu.sources");

/// Returns the files that changed since the PTX was made, one per line.
fn differences(sources: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listed = sources.lines().skip(2).filter_map(|line| line.split_once(' '));
    let changed = |(hash, path): (&str, &str)| {
        let bytes = fs::read(root.join(path)).unwrap_or_default();
        (format!("{:032x}", xxh3_128(&bytes)) != hash).then(|| path.to_owned())
    };
    listed.filter_map(changed).collect()
}

#[test]
fn the_ptx_was_made_from_these_sources() {
    let found = differences(SOURCES);
    let hint = "run `cargo xtask ptx`, and commit bench/ptx";
    assert!(found.is_empty(), "these changed since: {found:?}; {hint}");
    for part in ["ptx/bench_gpu.cu", "ptx/instant.cuh", "ptx/bench_gpu.ptx"] {
        assert!(SOURCES.contains(&format!(" {part}\n")), "{part} is not listed in\n{SOURCES}");
        let line = SOURCES.lines().find(|line| line.ends_with(part)).expect("listed");
        let other = SOURCES.replace(line, &format!("{:032x} {part}", 0));
        assert_eq!(differences(&other), [part]);
    }
}
