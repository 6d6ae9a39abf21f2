//! Rules about code: allowed places of atomics, fences and `unsafe`.

use crate::Rule;
use crate::mask::{Language, Mask, mask, words};
use crate::tree::{File, Tree, Violation, line_of};

pub const RULES: &[Rule] = &[
    Rule {
        name: "atomics in one place",
        check: atomics_in_one_place,
        sample: || {
            let uses = "use std::sync::atomic::AtomicU32;\n\
                        // std::sync::atomic in a comment\n\
                        use core::sync::{\n    Arc,\n    atomic,\n};\n\
                        static A: std :: sync :: atomic::AtomicU8 = x;\n\
                        use loom::sync::atomic::fence;\n\
                        use std::{\n    fs::{self, File},\n    sync::{Arc, atomic::fence},\n};\n";
            let fine = "use std::sync::Arc;\nfn atomic(x: &str) {}\nmod atomic;\n\
                        use std::{sync::Arc, atomic};\n\
                        use crate::sync::AtomicU32; // atomic::x\n";
            let allowed = ATOMICS.iter().map(|&(path, _)| (path, "use std::sync::atomic;".into()));
            let mut files = vec![("a.rs", uses.to_owned()), ("b.rs", fine.to_owned())];
            files.extend(allowed.skip(1));
            // An entry without atomics is stale.
            files.push((ATOMICS[0].0, String::new()));
            files
        },
        finds: &["a.rs:1", "a.rs:5", "a.rs:7", "a.rs:8", "a.rs:11", "gio-uring/src/sync.rs:1"],
    },
    Rule {
        name: "fences in one header",
        check: fences_in_one_header,
        sample: || {
            let code = "// __threadfence() in a comment\n\
                        __threadfence_system();\n\
                        asm volatile(\n    \"fence.acq_rel.sys;\" ::: \"memory\");\n\
                        __atomic_store_n(p, 1, __ATOMIC_RELEASE);\n\
                        std::atomic_thread_fence(std::memory_order_release);\n\
                        asm volatile(\"mov.u32 %0, %laneid;\" : \"=r\"(lane));\n";
            let rust = "std::sync::atomic::fence(x);\nfence(Ordering::Release);\n";
            vec![
                ("kernels/include/gio/a.cuh", code.into()),
                ("kernels/include/gio/order.cuh", code.into()),
                ("kernels/src/a.rs", rust.into()),
                ("docs/a.cpp", code.into()),
            ]
        },
        finds: &[
            "kernels/include/gio/a.cuh:2",
            "kernels/include/gio/a.cuh:3",
            "kernels/include/gio/a.cuh:5",
            "kernels/include/gio/a.cuh:6",
            "kernels/src/a.rs:1",
            "kernels/src/a.rs:2",
        ],
    },
    Rule {
        name: "unsafe with a reason",
        check: unsafe_with_a_reason,
        sample: || {
            let code = "// unsafe\nlet s = \"unsafe\";\nunsafe { f() }\n";
            let with = |head: &str| format!("{head}\n{code}");
            vec![
                ("none.rs", with("//! Nothing.")),
                ("bare.rs", with("#![allow(unsafe_code)]")),
                ("reason.rs", with("#![allow(\n    unsafe_code,\n    reason = \"mmio\"\n)]")),
                ("above.rs", with("// Registers are mapped memory.\n#![allow(unsafe_code)]")),
                ("beside.rs", with("#![allow(unsafe_code)] // mapped registers")),
                ("item.rs", with("#[allow(unsafe_code, reason = \"mmio\")]")),
                ("forbids.rs", "#![forbid(unsafe_code)]\n".into()),
            ]
        },
        finds: &["none.rs:4", "bare.rs:1"],
    },
    Rule {
        name: "no test is left out",
        check: no_test_is_left_out,
        sample: || {
            vec![
                ("a/Cargo.toml", "autotests = false\n[[test]]\nname = \"alone\"\n".into()),
                ("a/tests/all.rs", "mod one;\nmod lib;\n".into()),
                ("a/tests/alone.rs", String::new()),
                ("a/tests/lib/mod.rs", String::new()),
                ("a/tests/one.rs", String::new()),
                ("a/tests/two.rs", String::new()),
                ("b/tests/two.rs", String::new()),
            ]
        },
        finds: &["a/tests/two.rs:1"],
    },
];

/// The files that may name atomics, with the reasons.
const ATOMICS: &[(&str, &str)] = &[
    ("gio-uring/src/sync.rs", "the one shim between the rings and std or loom"),
    ("driver/host/src/platform/mmio.rs", "the accessors of memory that a device writes"),
    ("objstore/candle/src/pages.rs", "an engine's KV memory, which devices write"),
    ("driver/host/src/platform/vfio/mapping.rs", "a signal handler may use nothing else"),
    ("kernels/src/file/words.rs", "the file executor's end of the rings, as in order.cuh"),
    ("driver/host/src/grant.rs", "a counter, so that each grant has a number of its own"),
    ("driver/host/src/state.rs", "a counter that is read while others use the controller"),
    (
        "kernels/src/cuda/executor.rs",
        "the host's half of gio_should_exit, which loom checks in gio-uring",
    ),
];

const ORDER_HEADER: &str = "kernels/include/gio/order.cuh";

fn rust_code(file: &File) -> String {
    mask(&file.text, Language::Rust, Mask::CommentsAndStrings)
}

fn atomics_in_one_place(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in tree.with(&["rs"]) {
        let code = rust_code(file);
        let mut places =
            words(&code, "atomic").filter(|&at| is_path_to_atomics(&code, at)).peekable();
        if ATOMICS.iter().any(|&(path, _)| path == file.path) {
            if places.peek().is_none() {
                let message = "listed as a file with atomics, and has none; a list that is too \
                               long hides the next one: remove it from ATOMICS in tidy/code.rs";
                found.push(Violation::new(file, 1, message));
            }
            continue;
        }
        found.extend(places.map(|at| {
            let message = "atomics; their orderings are checked by loom, in gio-uring/src/sync.rs, \
                           and nowhere else: use that module, or a channel or lock; or add the \
                           file with its reason to ATOMICS in tidy/code.rs";
            Violation::new(file, line_of(&code, at), message)
        }));
    }
    found
}

/// Returns true if the word at `at` is the `atomic` of `std::sync::atomic` and the like, also in a
/// nested `use` tree.
fn is_path_to_atomics(code: &str, at: usize) -> bool {
    let start = code[..at].rfind(';').map_or(0, |semicolon| semicolon + 1);
    // The path so far, and the paths in front of open braces.
    let (mut path, mut open) = (String::new(), Vec::new());
    for letter in code[start..at].chars().filter(|letter| !letter.is_whitespace()) {
        match letter {
            '{' => open.push(path.clone()),
            '}' => path = open.pop().unwrap_or_default(),
            ',' => path = open.last().cloned().unwrap_or_default(),
            _ => path.push(letter),
        }
    }
    ["std::sync::", "core::sync::", "loom::sync::"].iter().any(|root| path.ends_with(root))
}

fn fences_in_one_header(tree: &Tree) -> Vec<Violation> {
    let message = "a fence or an atomic; the pairs of the I/O kernel can be checked only where \
                   they stand together: use a function of kernels/include/gio/order.cuh";
    let mut found = Vec::new();
    let inside = |file: &&File| file.path.starts_with("kernels/") && file.path != ORDER_HEADER;
    for file in tree.with(&["cuh", "cu", "h", "hpp", "cpp", "c"]).filter(inside) {
        // Strings are kept, because they contain PTX.
        let code = mask(&file.text, Language::Cpp, Mask::Comments);
        let named =
            ["__threadfence", "__atomic_", "__sync_", "atomic_thread_fence", "atomic_signal_fence"]
                .iter()
                .flat_map(|name| code.match_indices(name).map(|(at, _)| at));
        let ptx = words(&code, "asm").filter(|&at| {
            let statement = code[at..].split(';').next().unwrap_or_default();
            ["\"fence", "\"membar", "\"atom.", "\"red."].iter().any(|op| statement.contains(op))
        });
        let mut places: Vec<usize> = named.chain(ptx).map(|at| line_of(&code, at)).collect();
        places.sort_unstable();
        places.dedup();
        found.extend(places.into_iter().map(|line| Violation::new(file, line, message)));
    }
    let listed = |file: &&File| ATOMICS.iter().any(|&(path, _)| path == file.path);
    for file in tree.with(&["rs"]).filter(inside).filter(|file| !listed(file)) {
        let code = rust_code(file);
        let calls = words(&code, "fence").filter(|at| code[at + 5..].trim_start().starts_with('('));
        found.extend(calls.map(|at| Violation::new(file, line_of(&code, at), message)));
    }
    found
}

fn unsafe_with_a_reason(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in tree.with(&["rs"]) {
        let code = rust_code(file);
        let opt_ins: Vec<usize> = words(&code, "unsafe_code")
            .filter(|&at| {
                let attribute = code[..at].rsplit("#").next().unwrap_or_default();
                attribute.contains("allow(") || attribute.contains("expect(")
            })
            .collect();
        found.extend(opt_ins.iter().filter(|&&at| !has_reason(file, &code, at)).map(|&at| {
            let message = "unsafe_code allowed without a reason; a reader cannot tell whether it \
                           is still needed: add `reason = \"...\"`, or a comment above";
            Violation::new(file, line_of(&code, at), message)
        }));
        if opt_ins.is_empty()
            && let Some(at) = words(&code, "unsafe").next()
        {
            let message = "unsafe in a file that did not opt in; each such file is reviewed as \
                           one: move the code to one that has, or start this one with \
                           `#![allow(unsafe_code, reason = \"...\")]`";
            found.push(Violation::new(file, line_of(&code, at), message));
        }
    }
    found
}

/// Returns true if the attribute at byte `at` has a reason: inside, beside, or on the line above.
fn has_reason(file: &File, code: &str, at: usize) -> bool {
    let end = code[at..].find(']').map_or(code.len(), |end| at + end);
    if words(&code[at..end], "reason").next().is_some() {
        return true;
    }
    let start = code[..at].rfind('#').unwrap_or(at);
    let line = line_of(code, start);
    let comment_on =
        |wanted: usize| file.lines().any(|(number, text)| number == wanted && text.contains("//"));
    comment_on(line) || comment_on(line.wrapping_sub(1))
}

/// Cargo does not look for the tests of a crate that has `tests/all.rs`.
fn no_test_is_left_out(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for all in tree.with(&["rs"]).filter(|file| file.path.ends_with("/tests/all.rs")) {
        let folder = all.folder();
        let manifest = format!("{}/Cargo.toml", folder.trim_end_matches("/tests"));
        let manifest = tree.with(&["toml"]).find(|file| file.path == manifest);
        for file in tree.with(&["rs"]).filter(|file| file.folder() == folder) {
            let stem = file.path[folder.len() + 1..].trim_end_matches(".rs");
            let is_module = all.text.lines().any(|line| line == format!("mod {stem};"));
            let name = format!("name = \"{stem}\"");
            let is_target = manifest.is_some_and(|it| it.text.lines().any(|line| line == name));
            if !(stem == "all" || is_module || is_target) {
                let message = format!("never built: add `mod {stem};` to {}", all.path);
                found.push(Violation::new(file, 1, message));
            }
        }
    }
    found
}
