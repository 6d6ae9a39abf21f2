//! Rules about files as text: size, names, leftovers, and machine-specific content.

use crate::Rule;
use crate::mask::{is_word, words};
use crate::tree::{File, Tree, Violation};

pub const RULES: &[Rule] = &[
    Rule {
        name: "line length",
        check: line_length,
        sample: || {
            let lines = |width: usize| format!("//{}\n{}\n", "é".repeat(98), "x".repeat(width));
            let page = |start: &str| format!("{start}{}\n", "x ".repeat(50));
            let text = format!("```text\n{}```\n{}", page("."), page("."));
            vec![
                ("a.rs", lines(101)),
                ("b.toml", lines(100)),
                ("c.md", text),
                ("d.md", ["| ", "    ", "![a", "- "].map(page).concat()),
            ]
        },
        finds: &["a.rs:2", "c.md:4", "d.md:4"],
    },
    Rule {
        name: "file length",
        check: file_length,
        sample: || vec![("a.h", "x\n".repeat(801)), ("b.rs", "x\n".repeat(800))],
        finds: &["a.h:801"],
    },
    Rule {
        name: "nothing left undone",
        check: nothing_left_undone,
        sample: || {
            let late = concat!("fine\n// TO", "DO: later\n# FIX", "ME\n").to_owned();
            let marks = concat!("mktemp a.XXXXXX\n/* XX", "X */\n").to_owned();
            let code = concat!("todo", "!();\nunimplemented", "!()\ndbg", "!(x)\n").to_owned();
            vec![("a.sh", late), ("b.cuh", marks), ("c.rs", code), ("d.rs", "a_todo(x)".into())]
        },
        finds: &["a.sh:2", "a.sh:3", "b.cuh:2", "c.rs:1", "c.rs:2", "c.rs:3"],
    },
    Rule {
        name: "names that say something",
        check: names_that_say_something,
        sample: || {
            let paths = ["a/utils.rs", "b/common/mod.rs", "c/queue_manager.h", "d/uncommon.rs"];
            paths.map(|path| (path, String::new())).to_vec()
        },
        finds: &["a/utils.rs:1", "b/common/mod.rs:1", "c/queue_manager.h:1"],
    },
    Rule {
        name: "no registry hosts",
        check: no_registry_hosts,
        sample: || {
            let host = concat!("# see crates", ".io\n").to_owned();
            vec![
                ("a.toml", host.clone()),
                ("Cargo.lock", host),
                ("b.md", "https://github.com/\n".into()),
                ("c.md", concat!("pip install -i https://pypi", ".org/simple x\n").into()),
            ]
        },
        finds: &["a.toml:1", "c.md:1"],
    },
    Rule {
        name: "no paths of one machine",
        check: no_machine_paths,
        sample: || {
            let paths =
                concat!("cd \"/ho", "me/me\"\nPATH=/ro", "ot/bin\n/wo", "rk/x\n").to_owned();
            let fine = concat!("https://a.example/ho", "me/\n$A/wo", "rk/b\nroot/c\n").to_owned();
            vec![("a.sh", paths), ("b.md", fine)]
        },
        finds: &["a.sh:1", "a.sh:2", "a.sh:3"],
    },
];

const LINE_COLUMNS_MAX: usize = 100;
const FILE_LINES_MAX: usize = 800;
const SOURCES: &[&str] = &["rs", "cuh", "cu", "h", "hpp", "cpp", "c"];
const SOURCES_AND_TOML: &[&str] = &["rs", "cuh", "cu", "h", "hpp", "cpp", "c", "toml"];
const WRITTEN_BY_HAND: &[&str] =
    &["rs", "cuh", "cu", "h", "hpp", "cpp", "c", "toml", "sh", "py", "md", "yml", "yaml"];

/// Returns the violations of a rule about single lines, in these files.
fn in_lines<'a>(
    files: impl Iterator<Item = &'a File>,
    wrong: impl Fn(&str) -> Option<String>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in files {
        for (number, line) in file.lines() {
            found.extend(wrong(line).map(|message| Violation::new(file, number, message)));
        }
    }
    found
}

fn line_length(tree: &Tree) -> Vec<Violation> {
    let too_long = |line: &str| {
        let columns = line.chars().count();
        (columns > LINE_COLUMNS_MAX).then(|| {
            format!(
                "{columns} columns; two files must fit side by side: \
                 wrap the line at {LINE_COLUMNS_MAX}"
            )
        })
    };
    let mut found = in_lines(tree.with(SOURCES_AND_TOML), too_long);
    for file in tree.with(&["md"]) {
        let mut is_code = false;
        for (number, line) in file.lines() {
            is_code ^= line.starts_with("```");
            // Tables, indented code and pictures cannot be wrapped.
            if !is_code && !["|", "    ", "!["].iter().any(|mark| line.starts_with(mark)) {
                let message = too_long(line);
                found.extend(message.map(|message| Violation::new(file, number, message)));
            }
        }
    }
    found
}

fn file_length(tree: &Tree) -> Vec<Violation> {
    let lengths = tree.with(SOURCES).map(|file| (file, file.lines().count()));
    let too_long = lengths.filter(|&(_, lines)| lines > FILE_LINES_MAX);
    too_long
        .map(|(file, lines)| {
            let message = format!(
                "{lines} lines; a file is one subject that can be read in one go: \
                 split it, with {FILE_LINES_MAX} as the limit and 400 as the aim"
            );
            Violation::new(file, lines, message)
        })
        .collect()
}

fn nothing_left_undone(tree: &Tree) -> Vec<Violation> {
    let notes = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let macros = [concat!("to", "do!"), concat!("unimpl", "emented!"), concat!("d", "bg!")];
    in_lines(tree.with(WRITTEN_BY_HAND), |line| {
        let note = notes.iter().find(|note| words(line, note).next().is_some());
        // The name as a word, then a bracket: `a_todo!(` is another macro.
        let call = macros.iter().find(|call| {
            let starts = |at: usize| at == 0 || !is_word(line.as_bytes()[at - 1]);
            line.match_indices(*call).any(|(at, _)| {
                starts(at) && line[at + call.len()..].trim_start().starts_with(['(', '[', '{'])
            })
        });
        note.or(call).map(|left| {
            format!(
                "`{left}`; a gap in the code is invisible to those who use it: close it, \
                 or name it under `Not implemented` of the crate and return an error here"
            )
        })
    })
}

fn names_that_say_something(tree: &Tree) -> Vec<Violation> {
    let empty = ["util", "utils", "common", "manager", "helper", "helpers"];
    let mut found = Vec::new();
    for file in tree.files() {
        // Folders count: `common/mod.rs` is a file named common.
        let mut names = file.path.split('/').map(|part| part.split('.').next().unwrap_or(part));
        let bad = names.find(|name| {
            let name = name.to_lowercase();
            name.split(['_', '-']).any(|word| empty.contains(&word))
        });
        found.extend(bad.map(|name| {
            let message = format!(
                "`{name}` says nothing about what is inside, so everything ends up there: \
                 name the file after the thing it holds"
            );
            Violation::new(file, 1, message)
        }));
    }
    found
}

fn no_registry_hosts(tree: &Tree) -> Vec<Violation> {
    let hosts = [
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
        concat!("python", "hosted.org"),
        concat!("registry", ".npmjs.org"),
        concat!("deb", ".debian.org"),
        concat!("proxy.golang", ".org"),
        concat!("repo.maven.apache", ".org"),
    ];
    // Cargo writes its own index into the lock file.
    let files = tree.files().iter().filter(|file| file.name() != "Cargo.lock");
    in_lines(files, |line| {
        hosts.iter().find(|host| line.contains(*host)).map(|host| {
            format!(
                "`{host}`; where packages come from is the builder's choice: \
                 name the package, and leave its host to their configuration"
            )
        })
    })
}

fn no_machine_paths(tree: &Tree) -> Vec<Violation> {
    let folders = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    in_lines(tree.files().iter(), |line| {
        // Only absolute paths: not inside a URL, and not after a variable.
        let absolute =
            |at: usize| at == 0 || !is_word(line.as_bytes()[at - 1]) && !ends_path(&line[..at]);
        let hit =
            folders.iter().find(|folder| line.match_indices(*folder).any(|(at, _)| absolute(at)));
        hit.map(|folder| {
            format!(
                "a path under `{folder}` exists on one machine only: \
                 use one relative to the repository, or take it as an argument"
            )
        })
    })
}

fn ends_path(before: &str) -> bool {
    before.ends_with(['.', '-', '/', '~', '}', ')', '*', '>'])
}
