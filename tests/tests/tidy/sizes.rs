//! Rules about sizes that may only fall: the lines of a crate, types of the same name, files that
//! name an option. `tests/structure.toml` has the sizes at the last landing.
//!
//! `RIPIENO_WRITE_SIZES=1 cargo test -p ripieno-tests --test tidy` lowers them to today's.

use std::collections::BTreeMap;

use crate::Rule;
use crate::mask::{Language, Mask, is_word, mask, words};
use crate::structure::{
    LIMITS, at_entry, crate_of, identifier, is_product, items, limits, product_code,
};
use crate::tree::{File, Tree, Violation};

pub const RULES: &[Rule] = &[
    Rule {
        name: "crates do not grow",
        check: crates_do_not_grow,
        sample: || {
            let tests = "    #[cfg(test)]\n    mod tests {\n        mod a {}\n    }\n// Counts.\n";
            let budget = |name, size| format!("{name} = {{target=1, by='', size={size}}}\n");
            let budgets = [budget("'driver/a'", 9), budget("'b'", 2), budget("'d'", 1)];
            vec![
                ("driver/a/src/lib.rs", "\n// Counts.\n".repeat(5)),
                ("driver/a/src/tests.rs", "\n".into()),
                ("b/src/lib.rs", format!("{tests}#[cfg(test)]\nmod tests;\n")),
                ("b/src/generated.rs", "\n".into()),
                ("c/c.py", "\n".into()),
                (LIMITS, format!("[lines]\n{}", budgets.concat())),
            ]
        },
        finds: &[
            "tests/structure.toml:1", // c has no budget,
            "tests/structure.toml:2", // driver/a has ten lines,
            "tests/structure.toml:3", // b three,
            "tests/structure.toml:4", // and there is no d.
        ],
    },
    Rule {
        name: "few types have the same name",
        check: few_types_have_the_same_name,
        sample: || {
            let types = "pub struct Many;\nenum Listed {}\nunion Few {}\n";
            let inline = "#[cfg(test)]\nmod tests {\nstruct Few;\n}\n";
            let file = format!("{types}{inline}");
            let mut files: Vec<_> = ["a/src/a.rs", "a/src/b.rs", "b/src/a.rs", "b/tests/c.rs"]
                .map(|path| (path, file.clone()))
                .into();
            files.push(("b/src/d.rs", "struct Many;\nenum Listed {}\nenum Full {}\n".repeat(2)));
            files.push((LIMITS, "[types_of_a_name]\nListed = 4\nFew = 4\nFull = 2\n".into()));
            files
        },
        // Five types are named Many, and five Listed.
        finds: &["tests/structure.toml:1", "tests/structure.toml:2"],
    },
    Rule {
        name: "an option's name is in few files",
        check: options_are_in_few_files,
        sample: || {
            let declared =
                "\noptions! {\n    /// Help.\n    a_b: u8, b_c;\n    c: u8;\n    d_e: u8;\n}\n";
            let mut files = vec![
                (OPTIONS, declared.to_owned()),
                (LIMITS, "[files_of_an_option]\nd_e = 7\n".into()),
                ("a/tests/a.rs", "a_b".into()),
            ];
            for path in ["a/a.rs", "a/b.rs", "a/c.rs", "a/d.rs", "b/e.py", "b/f.h"] {
                files.push((path, "a_b b_c c d_e\n".into()));
            }
            files
        },
        finds: &["tests/structure.toml:1"],
    },
];

/// Types of one name in the workspace.
const TYPES_MAX: usize = 3;
/// Files of product code that name an option.
const OPTION_FILES_MAX: usize = 6;
/// The file that declares all options.
const OPTIONS: &str = "objstore/stack/src/config.rs";
/// Extensions of product code.
const SOURCES: &[&str] = &["rs", "py", "pyi", "cuh", "cu", "h", "c", "cpp", "inc", "sh"];

/// Returns the number of lines of inline modules below `#[cfg(test)]`, which end with a brace in
/// the same column.
fn inline_tests(file: &File) -> usize {
    let lines: Vec<&str> = file.text.lines().collect();
    let (mut count, mut at) = (0, 0);
    while at < lines.len() {
        if lines[at].trim_start().starts_with("#[cfg(test)]") {
            let start = at;
            // Behind further attributes.
            let is_end = |at: &usize| is_module(lines[*at]) || at - start == 4;
            at = (start..lines.len()).find(is_end).unwrap_or(lines.len());
            if lines.get(at).is_some_and(|line| is_module(line) && line.contains(" {")) {
                let indent = lines[start].len() - lines[start].trim_start().len();
                let brace = format!("{}}}", &lines[start][..indent]);
                let is_end = |at: &usize| lines[*at].trim_end() == brace;
                at = (at..lines.len()).find(is_end).unwrap_or(lines.len() - 1);
                count += at - start + 1;
            }
        }
        at += 1;
    }
    count
}

fn is_module(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("mod ") || line.starts_with("pub") && line.contains(" mod ")
}

/// Returns the product lines of each crate.
fn sizes(tree: &Tree) -> BTreeMap<&str, usize> {
    let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
    for file in tree.with(SOURCES).filter(|file| !file.path.contains("generated")) {
        let size = sizes.entry(crate_of(&file.path)).or_default();
        if is_product(&file.path) {
            let tests = if file.is(&["rs"]) { inline_tests(file) } else { 0 };
            *size += file.text.lines().count() - tests;
        }
    }
    sizes
}

fn crates_do_not_grow(tree: &Tree) -> Vec<Violation> {
    let (file, limits) = limits(tree);
    let sizes = sizes(tree);
    let mut found = Vec::new();
    for (name, lines) in &sizes {
        let size = limits.lines.get(*name).map_or(0, |budget| budget.size);
        if *lines > size {
            let message = format!(
                "crate {name}: {lines} product lines, and {size} at the last landing; remove what \
                 is not needed, or raise the size and give the reason in the commit's message"
            );
            found.push(at_entry(file, name, message));
        }
    }
    for name in limits.lines.keys().filter(|name| !sizes.contains_key(name.as_str())) {
        let message = format!("a size of `{name}`, and there is no such crate: remove it");
        found.push(at_entry(file, name, message));
    }
    found
}

fn few_types_have_the_same_name(tree: &Tree) -> Vec<Violation> {
    let types = types_of_a_name(tree);
    let (file, limits) = limits(tree);
    let too_many = |(name, count): (&String, &usize)| {
        let most = limits.types_of_a_name.get(name).copied().unwrap_or(0).max(TYPES_MAX);
        (*count > most).then(|| {
            let message = format!(
                "{count} types are named `{name}`, and {most} may be: a reader who looks for one \
                 finds the others; name it after what it holds"
            );
            at_entry(file, name, message)
        })
    };
    types.iter().filter_map(too_many).collect()
}

/// Returns the number of types of each name.
fn types_of_a_name(tree: &Tree) -> BTreeMap<String, usize> {
    let mut types = BTreeMap::new();
    for (_, code) in &product_code(tree) {
        for at in items(code, "struct").chain(items(code, "enum")).chain(items(code, "union")) {
            let name = identifier(&code[at..]);
            // A macro has its argument there.
            if !name.is_empty() {
                *types.entry(name.to_owned()).or_default() += 1;
            }
        }
    }
    types
}

fn options_are_in_few_files(tree: &Tree) -> Vec<Violation> {
    let (file, limits) = limits(tree);
    let files = files_of_an_option(tree);
    let too_many = |(name, count): (&String, &usize)| {
        let most = limits.files_of_an_option.get(name).copied().unwrap_or(0).max(OPTION_FILES_MAX);
        (*count > most).then(|| {
            let message = format!(
                "the option `{name}` is in {count} files, and {most} may be: hand its value on in \
                 the structure that has all options"
            );
            at_entry(file, name, message)
        })
    };
    files.iter().filter_map(too_many).collect()
}

/// Returns the number of files of product code that name each option. Names of one word are left
/// out: they mean other things as well.
fn files_of_an_option(tree: &Tree) -> BTreeMap<String, usize> {
    let declared = tree.file(OPTIONS).and_then(|file| file.text.split("\noptions! {").nth(1));
    let declared = declared.and_then(|rest| rest.split("\n}").next()).unwrap_or_default();
    let names = declared.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    let names =
        names.map(|(name, _)| name).filter(|name| name.contains('_') && name.bytes().all(is_word));
    let sources = || tree.with(SOURCES).filter(|file| is_product(&file.path));
    let code: Vec<String> =
        sources().map(|file| mask(&file.text, Language::Rust, Mask::Comments)).collect();
    let count = |name: &str| code.iter().filter(|code| words(code, name).next().is_some()).count();
    names.map(|name| (name.to_owned(), count(name))).collect()
}

/// Returns [`LIMITS`] with the numbers of today where they are lower, and without those that need
/// no exception.
pub fn lowered(tree: &Tree) -> String {
    let lines = sizes(tree).into_iter().map(|(name, lines)| (name.to_owned(), lines));
    let sections = BTreeMap::from([
        ("[lines]", (lines.collect(), 0)),
        ("[types_of_a_name]", (types_of_a_name(tree), TYPES_MAX)),
        ("[files_of_an_option]", (files_of_an_option(tree), OPTION_FILES_MAX)),
    ]);
    let lower = |section: &str, line: &str| -> Option<String> {
        let (numbers, most): &(BTreeMap<String, usize>, usize) = sections.get(section)?;
        let now =
            numbers.get(line.split_once(" = ")?.0.trim_matches(['"', '\''])).copied().unwrap_or(0);
        let entry = line.trim_end_matches(" }");
        let (before, number) = entry.rsplit_once(' ')?;
        let now = now.min(number.parse().ok()?);
        let text = format!("{before} {now}{}\n", &line[entry.len()..]);
        Some(if now > *most { text } else { String::new() })
    };
    let (mut section, mut text) = ("", String::new());
    for line in limits(tree).0.text.lines() {
        section = if line.starts_with('[') { line } else { section };
        text += &lower(section, line).unwrap_or_else(|| format!("{line}\n"));
    }
    text
}

#[test]
fn numbers_are_lowered_and_never_raised() {
    let limits = "[lines]\n'a' = { target = 1, by = '', size = 9 }\n\
                  'b' = { target = 1, by = '', size = 1 }\n\n\
                  [types_of_a_name]\nFew = 5\nMany = 9\nMost = 4\n";
    let types = |name: &str, count| format!("struct {name};\n").repeat(count);
    let code = types("Few", 3) + &types("Many", 4) + &types("Most", 6);
    let tree = Tree::of_samples(vec![
        ("a/src/a.rs", "\n".repeat(7)),
        ("b/src/b.rs", code),
        (LIMITS, limits.to_owned()),
    ]);
    let wanted = limits.replace("size = 9", "size = 7").replace("Few = 5\n", "");
    assert_eq!(lowered(&tree), wanted.replace("Many = 9", "Many = 4"));
}
