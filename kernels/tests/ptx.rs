//! The committed PTX and the Rust half of the headers match the sources. No compiler is needed to
//! check: `cargo xtask ptx` and `cargo xtask abi` recorded hashes of their input.

use std::fs;
use std::path::Path;

use gio_kernels::{
    pool::{self, PatternArgs, ScatterGatherArgs},
    ptx::{
        BLOCK_THREADS_MAX, ENTRY, PATTERN_ENTRY, POOL_PTX, POOL_SOURCES, PTX, SCATTER_GATHER_ENTRY,
        SOURCE_HASH, SOURCES,
    },
};
use gio_uring::abi::Args;
use xxhash_rust::xxh3::xxh3_128;

const REBUILD: &str = "run `cargo xtask ptx`, and commit kernels/ptx";

/// The source list of each module.
const MODULES: [(&str, &str); 2] = [("gio_kernel", SOURCES), ("gio_pool", POOL_SOURCES)];

/// Returns the differences from the state when `manifest` was written, one per line.
fn differences(module: &str, manifest: &str, root: &Path) -> Vec<String> {
    let (first, rest) = manifest.split_once('\n').unwrap_or_default();
    let mut found = Vec::new();
    if first != format!("{:032x}", xxh3_128(rest.as_bytes())) {
        found.push(format!("ptx/{module}.sources was edited"));
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
    // A new header changes the one that includes it; this checks that the list is complete.
    for (_, path) in &listed {
        let text = fs::read_to_string(root.join(path)).unwrap_or_default();
        for name in text.lines().filter_map(|line| line.strip_prefix("#include \"")) {
            let name = name.trim_end_matches('"').rsplit('/').next().unwrap_or_default();
            if !listed.iter().any(|(_, known)| known.rsplit('/').next() == Some(name)) {
                found.push(format!("{name}, which {path} includes, is not listed"));
            }
        }
    }
    found
}

#[test]
fn the_ptx_was_made_from_these_headers() {
    for (module, sources) in MODULES {
        let found = differences(module, sources, Path::new(env!("CARGO_MANIFEST_DIR")));
        assert!(found.is_empty(), "the PTX is not of these sources: {found:#?}\n{REBUILD}");
        for part in [&format!("ptx/{module}.cu\n"), &format!("ptx/{module}.ptx\n")] {
            assert!(sources.contains(part), "{part:?} is not listed in\n{sources}");
        }
        assert!(sources.contains(" include/gio/order.cuh\n"), "{sources}");
    }
    assert_eq!(SOURCES.lines().next(), Some(SOURCE_HASH));
}

#[test]
fn the_rust_half_was_made_from_these_headers() {
    let bindings = [
        ("include/gio/abi.h", include_str!("../../gio-uring/src/abi/generated.rs")),
        ("include/pool/abi.h", include_str!("../src/pool/generated.rs")),
    ];
    for (path, rust) in bindings {
        let header = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect(path);
        let line = format!("// {:032x} kernels/{path}\n", xxh3_128(&header));
        assert!(
            rust.contains(&line),
            "{path} changed: run `cargo xtask abi`, commit what it wrote"
        );
    }
}

#[test]
fn a_change_of_any_source_is_seen() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (module, sources) in MODULES {
        for (line, text) in sources.lines().enumerate().skip(2) {
            let path = &text[33..];
            let changed = sources.replace(text, &format!("{:032x} {path}", 0));
            let found = differences(module, &changed, root);
            for wanted in [format!("ptx/{module}.sources was edited"), format!("{path} changed")] {
                assert!(found.contains(&wanted), "{module}, line {line}: {found:?}");
            }
        }
        let kept = |line: &&str| !line.ends_with("/order.cuh");
        let shorter: Vec<&str> = sources.lines().filter(kept).collect();
        let found = differences(module, &(shorter.join("\n") + "\n"), root);
        let left_out = |one: &String| one.starts_with("order.cuh, which ");
        assert!(found.iter().any(left_out), "{module}: {found:?}");
    }
}

/// Asserts an entry with one parameter of this size, and at most `threads` threads per block.
fn assert_entry(ptx: &str, entry: &str, size: usize, threads: u32) {
    let head = format!(
        ".visible .entry {entry}(\n\t.param .align 8 .b8 {entry}_param_0[{size}]\n)\n\
         .maxntid {threads}, 1, 1\n"
    );
    assert!(ptx.contains(&head), "the PTX has no {head:?}; {REBUILD}");
    assert!(ptx.contains("\n.target sm_90\n"), "{REBUILD}");
}

#[test]
fn the_entries_are_what_is_launched() {
    assert_entry(PTX, ENTRY, size_of::<Args>(), BLOCK_THREADS_MAX);
    let threads = pool::BLOCK_THREADS_MAX;
    assert_entry(POOL_PTX, SCATTER_GATHER_ENTRY, size_of::<ScatterGatherArgs>(), threads);
    assert_entry(POOL_PTX, PATTERN_ENTRY, size_of::<PatternArgs>(), threads);
}
