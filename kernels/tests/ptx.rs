//! The committed PTX belongs to the sources. No compiler is needed to see that: `cargo xtask ptx`
//! wrote down what it compiled.

use std::fs;
use std::path::Path;

use gio_kernels::ptx::{BLOCK_THREADS_MAX, ENTRY, PTX, SOURCE_HASH, SOURCES};
use gio_uring::abi::Args;
use xxhash_rust::xxh3::xxh3_128;

const REBUILD: &str = "run `cargo xtask ptx`, and commit kernels/ptx";

/// What is not as it was when `manifest` was written, a line each.
fn differences(manifest: &str, root: &Path) -> Vec<String> {
    let (first, rest) = manifest.split_once('\n').unwrap_or_default();
    let mut found = Vec::new();
    if first != format!("{:032x}", xxh3_128(rest.as_bytes())) {
        found.push("ptx/gio_kernel.sources was edited".to_owned());
    }
    let listed: Vec<(&str, &str)> =
        rest.lines().skip(1).filter_map(|line| line.split_once(' ')).collect();
    for &(hash, path) in &listed {
        match fs::read(root.join(path)) {
            Ok(bytes) if format!("{:032x}", xxh3_128(&bytes)) == hash => {}
            Ok(_) => found.push(format!("{path} changed")),
            Err(error) => found.push(format!("{path}: {error}")),
        }
    }
    for entry in fs::read_dir(root.join("include/gio")).expect("the headers are there").flatten() {
        let path = format!("include/gio/{}", entry.file_name().to_string_lossy());
        if !listed.iter().any(|&(_, known)| known == path) {
            found.push(format!("{path} is new"));
        }
    }
    found
}

#[test]
fn the_ptx_was_made_from_these_headers() {
    let found = differences(SOURCES, Path::new(env!("CARGO_MANIFEST_DIR")));
    assert!(found.is_empty(), "the PTX is not of these sources: {found:#?}\n{REBUILD}");
    assert_eq!(SOURCES.lines().next(), Some(SOURCE_HASH));
    for part in ["ptx/gio_kernel.cu\n", "ptx/gio_kernel.ptx\n", "include/gio/order.cuh\n"] {
        assert!(SOURCES.contains(part), "{part:?} is not listed in\n{SOURCES}");
    }
}

#[test]
fn a_change_of_any_source_is_seen() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (line, text) in SOURCES.lines().enumerate().skip(2) {
        let path = &text[33..];
        let changed = SOURCES.replace(text, &format!("{:032x} {path}", 0));
        let found = differences(&changed, root);
        for wanted in ["ptx/gio_kernel.sources was edited", &format!("{path} changed")] {
            assert!(found.iter().any(|one| one == wanted), "line {line}: {found:?}");
        }
    }
    let shorter: Vec<&str> = SOURCES.lines().filter(|line| !line.ends_with("/abi.h")).collect();
    let found = differences(&(shorter.join("\n") + "\n"), root);
    assert!(found.iter().any(|one| one == "include/gio/abi.h is new"), "{found:?}");
}

#[test]
fn the_entry_is_what_the_executor_launches() {
    let size = size_of::<Args>();
    for wanted in [
        format!(".visible .entry {ENTRY}(\n\t.param .align 8 .b8 {ENTRY}_param_0[{size}]\n)"),
        format!("\n.maxntid {BLOCK_THREADS_MAX}, 1, 1\n"),
        "\n.target sm_90\n".to_owned(),
    ] {
        assert!(PTX.contains(&wanted), "the PTX has no {wanted:?}; {REBUILD}");
    }
}
