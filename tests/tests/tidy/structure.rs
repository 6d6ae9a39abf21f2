//! Rules about structure: how far a type spreads, how wide a struct is, and files that import each
//! other in a circle. `tests/structure.toml` has the exceptions.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::Rule;
use crate::mask::{Language, Mask, is_word, mask, words};
use crate::tree::{File, Tree, Violation, line_of};

pub const RULES: &[Rule] = &[
    Rule {
        name: "a type is in few files",
        check: types_are_in_few_files,
        sample: || {
            let spread = |name: &str| format!("impl<T: Fn() -> u8> Debug for {name}<T> {{}}\n");
            let both = [spread("Spread"), spread("Listed")].concat();
            let mut files: Vec<_> = ["a/src/a.rs", "a/src/b.rs", "a/src/c.rs", "a/src/d.rs"]
                .map(|path| (path, both.clone()))
                .into();
            // Its own type of that name, and neither is a fifth file with an impl.
            files.push(("a/src/e.rs", "struct Spread;\nimpl Spread {}\n".into()));
            files.push(("a/src/f.rs", "#[cfg(test)]\nmod tests {\nimpl Spread {}\n}\n".into()));
            files.push(("a/tests/g.rs", "impl Spread {}\n".into()));
            files.push(("a/src/lib.rs", format!("struct Spread;\nstruct Listed;\n{both}")));
            let entry = |name: &str| format!("[[type]]\nname = 'a {name}'\nreason = 'r'\n");
            files.push((LIMITS, [entry("Listed"), entry("Stale")].concat()));
            files
        },
        finds: &["a/src/lib.rs:1", "tests/structure.toml:5"],
    },
    Rule {
        name: "a struct has few fields",
        check: structs_have_few_fields,
        sample: || {
            let fields = |count| "    pub a: Map<u8, fn(u8, [u8; 2]) -> u8>,\n".repeat(count);
            let with = |name: &str, count| format!("struct {name} {{\n{}}}\n", fields(count));
            let wire = format!("#[repr(C)]\npub {}", with("Wire", 17));
            let report = format!("#[derive(Debug, Serialize)]\n{}", with("Report", 17));
            let code = [with("Wide", 17), with("Full", 16), wire, report, with("Listed", 17)];
            let limits = "[[struct]]\nname = 'a Listed'\nreason = 'r'\n\n\
                          [[struct]]\nname = 'a Full'\nreason = 'no longer true'\n";
            vec![("a/src/a.rs", code.concat()), (LIMITS, limits.into())]
        },
        finds: &["a/src/a.rs:1", "tests/structure.toml:6"],
    },
    Rule {
        name: "files import each other in no circle",
        check: files_in_no_circle,
        sample: || {
            let limits = "[[circle]]\nfiles = ['a/src/x.rs', 'a/src/y.rs']\nreason = 'r'\n\n\
                          [[circle]]\nfiles = ['a/src/x.rs', 'a/src/x/z.rs']\nreason = 'r'\n";
            let files = [
                ("a/src/lib.rs", "mod b;\nmod c;\nmod x;\nmod y;\npub use b::B;\n"),
                ("a/src/b.rs", "mod d;\nuse crate::{c::{C}, B};\nfn f() { d::f() }\n"),
                ("a/src/b/d.rs", "use super::B;\n"), // From a part to its whole.
                ("a/src/c.rs", "use super::b::{self, d};\n"),
                ("a/src/x.rs", "mod z;\nfn f() { crate::y::f() }\n"),
                (
                    "a/src/x/z.rs",
                    "//! crate::y\n#[cfg(test)]\nmod tests { use super::super::y; }\n",
                ),
                ("a/src/y.rs", "fn f() -> super::x::X {}\n"),
            ];
            let files = files.into_iter().map(|(path, text)| (path, text.to_owned()));
            files.chain([(LIMITS, limits.to_owned())]).collect()
        },
        finds: &["a/src/b.rs:1", "tests/structure.toml:6"],
    },
];

pub const LIMITS: &str = "tests/structure.toml";
const IMPL_FILES_MAX: usize = 4;
const FIELDS_MAX: usize = 16;
/// Derives and attributes of wire formats, reports and options.
const WIDE_KINDS: [&str; 6] = ["repr(C", "Serialize", "Deserialize", "Args", "Parser", "FromBytes"];

/// The contents of [`LIMITS`].
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    #[serde(default)]
    pub lines: BTreeMap<String, Budget>,
    /// Names that too many types have, and the number of these types.
    #[serde(default)]
    pub types_of_a_name: BTreeMap<String, usize>,
    /// Names of options that are in too many files, and the number of these files.
    #[serde(default)]
    pub files_of_an_option: BTreeMap<String, usize>,
    #[serde(default, rename = "type")]
    types: Vec<Exception>,
    #[serde(default, rename = "struct")]
    structs: Vec<Exception>,
    #[serde(default, rename = "circle")]
    circles: Vec<Circle>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    /// The crate, and the type in it.
    name: String,
    #[serde(rename = "reason")]
    _reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Circle {
    files: BTreeSet<String>,
    #[serde(rename = "reason")]
    _reason: String,
}

/// Product lines of a crate.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// At the end of the day `by`.
    #[serde(rename = "target")]
    _target: usize,
    #[serde(rename = "by")]
    _by: String,
    /// At the last landing.
    pub size: usize,
}

pub fn limits(tree: &Tree) -> (&File, Limits) {
    let file = tree.file(LIMITS).expect("the limits are in the tree");
    (file, basic_toml::from_str(&file.text).unwrap_or_else(|error| panic!("{LIMITS}: {error}")))
}

/// Returns a violation for an entry of [`LIMITS`], at the first line with `text` in quotes.
pub fn at_entry(limits: &File, text: &str, message: String) -> Violation {
    let names = |line: &str| {
        line.split(' ').next() == Some(text) || line.split(['"', '\'']).any(|part| part == text)
    };
    let line = limits.lines().find(|(_, line)| names(line)).map_or(1, |(line, _)| line);
    Violation::new(limits, line, message)
}

/// Returns violations for entries that no longer have to be there.
fn stale<'a>(
    file: &'a File,
    entries: &'a [Exception],
    found: &'a BTreeSet<String>,
) -> impl Iterator<Item = Violation> + 'a {
    entries.iter().filter(|entry| !found.contains(&entry.name)).map(|Exception { name, .. }| {
        let message = format!("`{name}` needs no exception any more: remove it");
        at_entry(file, name, message)
    })
}

/// Returns the crate of a path as the budgets name it.
pub fn crate_of(path: &str) -> &str {
    let nested = ["driver/", "tools/", "tests/", "objstore/"].iter().any(|at| path.starts_with(at));
    let ends: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
    match ends[..] {
        [first, second, ..] if nested && !["src", "tests"].contains(&&path[first + 1..second]) => {
            &path[..second]
        }
        [first, ..] => &path[..first],
        [] => path,
    }
}

/// Returns whether the file is product code: not a test, and written by hand.
pub fn is_product(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let test = path.contains("/tests/")
        || path.contains("/mock/")
        || path.starts_with("tests/")
        || path.starts_with("findings/")
        || name.contains("test");
    !test && !path.contains("generated")
}

/// Returns the Rust files of products, with their code without comments, strings and inline tests.
pub fn product_code(tree: &Tree) -> Vec<(&File, String)> {
    let files = tree.with(&["rs"]).filter(|file| is_product(&file.path));
    let code = |file: &File| {
        let mut code = mask(&file.text, Language::Rust, Mask::CommentsAndStrings);
        while let Some(start) = code.find("#[cfg(test)]") {
            let open = code[start..].find(['{', ';']).map_or(code.len(), |at| start + at);
            let end = if code[open..].starts_with('{') { block_end(&code, open) } else { open };
            let blank: String =
                code[start..end].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
            code.replace_range(start..end, &blank);
        }
        code
    };
    files.map(|file| (file, code(file))).collect()
}

/// Returns the end of the block whose brace opens at `open`.
fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, letter) in code[open..].char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return open + at + 1;
        }
    }
    code.len()
}

/// Returns the items that begin a line with `keyword` (and `pub` or `unsafe`): the offset after it.
pub fn items<'a>(code: &'a str, keyword: &'static str) -> impl Iterator<Item = usize> + 'a {
    words(code, keyword).filter_map(move |at| {
        let line = code[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let before = code[line..at].trim();
        let starts = ["", "unsafe", "pub"].contains(&before)
            || before.starts_with("pub(") && before.ends_with(')');
        starts.then_some(at + keyword.len())
    })
}

/// Returns the text without what stands in angle brackets.
fn without_generics(text: &str) -> String {
    let mut depth = 0;
    let text = text.replace("->", "");
    let outside = |letter: &char| {
        depth += i32::from(*letter == '<');
        let outside = depth == 0;
        depth -= i32::from(*letter == '>');
        outside
    };
    text.chars().filter(outside).collect()
}

pub fn identifier(text: &str) -> &str {
    let text = text.trim_start();
    &text[..text.bytes().position(|byte| !is_word(byte)).unwrap_or(text.len())]
}

fn types_are_in_few_files(tree: &Tree) -> Vec<Violation> {
    let (limits_file, limits) = limits(tree);
    // By crate and name: the files that define such a type, and those with an impl.
    let mut defined: BTreeMap<String, Vec<&File>> = BTreeMap::new();
    let mut implemented: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (file, code) in &product_code(tree) {
        let name = |of: &str| format!("{} {of}", crate_of(&file.path));
        for at in items(code, "struct").chain(items(code, "enum")).chain(items(code, "union")) {
            defined.entry(name(identifier(&code[at..]))).or_default().push(file);
        }
        for at in items(code, "impl") {
            let head = without_generics(code[at..].split('{').next().unwrap_or_default());
            let head = head.split(" where").next().unwrap_or_default();
            let of = head.rsplit(" for ").next().unwrap_or_default();
            let of = of.rsplit("::").next().unwrap_or_default();
            implemented.entry(name(identifier(of))).or_default().insert(&file.path);
        }
    }
    let mut wide = BTreeSet::new();
    let mut found = Vec::new();
    for (name, files) in &defined {
        // A file that defines a type of the same name has the impls of its own.
        let own = |path: &&&str| files.iter().any(|file| file.path == **path);
        let all = implemented.get(name).into_iter().flatten();
        let count = all.clone().filter(|path| !own(path)).count()
            + usize::from(all.clone().any(|path| own(&path)));
        if count <= IMPL_FILES_MAX {
            continue;
        }
        wide.insert(name.clone());
        if limits.types.iter().all(|entry| entry.name != *name) {
            let message = format!(
                "`{name}` has an impl in {count} files, and {IMPL_FILES_MAX} are the limit: a \
                 reader cannot hold what may change its state; carve types with their own state \
                 out of it"
            );
            found.push(Violation::new(files[files.len() - 1], 1, message));
        }
    }
    found.extend(stale(limits_file, &limits.types, &wide));
    found
}

fn structs_have_few_fields(tree: &Tree) -> Vec<Violation> {
    let (limits_file, limits) = limits(tree);
    let mut wide = BTreeSet::new();
    let mut found = Vec::new();
    for (file, code) in &product_code(tree) {
        for at in items(code, "struct") {
            let Some(open) = code[at..].find(['{', ';', '(']).map(|open| at + open) else {
                continue;
            };
            if !code[open..].starts_with('{') {
                continue;
            }
            let count = fields(&code[open + 1..block_end(code, open) - 1]);
            let attributes = code[..at].rsplit([';', '}']).next().unwrap_or_default();
            if count <= FIELDS_MAX || WIDE_KINDS.iter().any(|kind| attributes.contains(kind)) {
                continue;
            }
            let name = format!("{} {}", crate_of(&file.path), identifier(&code[at..]));
            if limits.structs.iter().all(|entry| entry.name != name) {
                let message = format!(
                    "`{name}` has {count} fields, and {FIELDS_MAX} are the limit (but for wire \
                     formats, options and reports): group those that change together in types of \
                     their own"
                );
                found.push(Violation::new(file, line_of(code, at), message));
            }
            wide.insert(name);
        }
    }
    found.extend(stale(limits_file, &limits.structs, &wide));
    found
}

/// Counts the fields in the body of a struct.
fn fields(body: &str) -> usize {
    let (mut depth, mut count, mut open) = (0, 0, false);
    for letter in without_generics(body).chars() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => open = false,
            ':' if depth == 0 && !open => {
                count += 1;
                open = true;
            }
            _ => {}
        }
    }
    count
}

/// Files of a crate by module path, such as `journal::error`; the crate itself is the empty path.
type Modules<'a> = BTreeMap<String, &'a str>;

/// Returns the crate's folder and the path of the file's module in it.
fn module(path: &str) -> Option<(&str, String)> {
    let (root, inside) = path.split_once("/src/")?;
    let inside = inside.strip_suffix(".rs")?;
    let inside = inside.strip_suffix("/mod").unwrap_or(inside).replace('/', "::");
    Some((root, if inside == "lib" || inside == "main" { String::new() } else { inside }))
}

fn files_in_no_circle(tree: &Tree) -> Vec<Violation> {
    let (limits_file, limits) = limits(tree);
    let code = product_code(tree);
    let mut crates: BTreeMap<&str, Modules> = BTreeMap::new();
    for (file, _) in &code {
        if let Some((root, module)) = module(&file.path) {
            crates.entry(root).or_default().insert(module, &file.path);
        }
    }
    let mut arrows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (file, code) in &code {
        let Some((root, own)) = module(&file.path) else { continue };
        arrows.insert(&file.path, imports(code, &own, &crates[root]));
    }
    let mut circles: Vec<BTreeSet<&str>> = Vec::new();
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        arrows.keys().map(|from| (*from, reach(from, &arrows))).collect();
    for (file, to) in &reached {
        let circle: BTreeSet<&str> =
            to.iter().copied().filter(|other| reached[other].contains(file)).collect();
        if circle.first() == Some(file) {
            circles.push(circle);
        }
    }
    let mut found = Vec::new();
    for circle in &circles {
        let listed = limits.circles.iter().any(|Circle { files, .. }| {
            circle.len() == files.len() && files.iter().all(|file| circle.contains(file.as_str()))
        });
        if !listed {
            let ties = circle.iter().flat_map(|from| {
                let to = arrows[from].iter().filter(|to| circle.contains(*to));
                to.map(move |to| format!("\n    {from} -> {to}"))
            });
            let message = format!(
                "{} files import each other in a circle; none of them can be understood before \
                 the others: move what the lower ones need into a leaf{}",
                circle.len(),
                ties.collect::<String>()
            );
            let first =
                tree.files().iter().find(|file| Some(&*file.path) == circle.first().copied());
            found.push(Violation::new(first.expect("a file of the tree"), 1, message));
        }
    }
    for Circle { files, .. } in &limits.circles {
        let still = |circle: &BTreeSet<&str>| {
            circle.len() == files.len() && files.iter().all(|file| circle.contains(file.as_str()))
        };
        if !circles.iter().any(still) {
            let all: Vec<&str> = files.iter().map(String::as_str).collect();
            let message = format!(
                "the circle of these {} files is another one by now, or none: change or remove it",
                all.len()
            );
            found.push(at_entry(limits_file, all[all.len() - 1], message));
        }
    }
    found
}

/// Returns the files that `from` reaches over at least one arrow.
fn reach<'a>(from: &str, arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        for to in arrows.get(file).into_iter().flatten() {
            if reached.insert(*to) {
                next.push(to);
            }
        }
    }
    reached
}

/// Returns the files that the code of module `own` names. A path to an enclosing module is none:
/// the whole is made of its parts, which may name it.
fn imports<'a>(code: &str, own: &str, modules: &Modules<'a>) -> BTreeSet<&'a str> {
    let mut paths = Vec::new();
    let parent =
        |module: &str| module.rsplit_once("::").map_or("", |(parent, _)| parent).to_owned();
    let child = |module: &str, name: &str| match module {
        "" => name.to_owned(),
        _ => format!("{module}::{name}"),
    };
    for (at, _) in code.match_indices("::") {
        let word = code[..at].rfind(|letter: char| !letter.is_ascii() || !is_word(letter as u8));
        let start = word.map_or(0, |word| word + 1);
        if code[..start].ends_with("::") {
            continue;
        }
        let from = match &code[start..at] {
            "crate" => String::new(),
            "self" => own.to_owned(),
            "super" => parent(own),
            name if modules.contains_key(&child(own, name)) => child(own, name),
            _ => continue,
        };
        tree_paths(&code[at + 2..], from, &mut paths);
    }
    let mut found = BTreeSet::new();
    for (from, names) in paths {
        let mut module = from;
        for name in names {
            if name == "super" {
                module = parent(&module);
            } else if modules.contains_key(&child(&module, &name)) {
                module = child(&module, &name);
            } else {
                break;
            }
        }
        let encloses = module.is_empty()
            || own == module
            || own.strip_prefix(&module).is_some_and(|rest| rest.starts_with("::"));
        if !encloses && let Some(file) = modules.get(&module) {
            found.insert(*file);
        }
    }
    found
}

/// Appends the paths of a `use` tree or of an expression, each with the module where it begins.
fn tree_paths(text: &str, from: String, paths: &mut Vec<(String, Vec<String>)>) {
    let mut prefix: Vec<String> = Vec::new();
    let mut open: Vec<usize> = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let name = identifier(rest);
        rest = rest[name.len()..].trim_start();
        if !name.is_empty() {
            prefix.push(name.to_owned());
        }
        if let Some(alias) = rest.strip_prefix("as ") {
            rest = &alias.trim_start()[identifier(alias).len()..];
        }
        rest = rest.strip_prefix('*').unwrap_or(rest);
        if !rest.starts_with("::") && !rest.starts_with('{') {
            paths.push((from.clone(), prefix.clone()));
        }
        if let Some(after) = rest.strip_prefix("::") {
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            open.push(prefix.len());
            rest = after;
        } else if let (Some(&base), Some(after)) = (open.last(), rest.strip_prefix(',')) {
            prefix.truncate(base);
            rest = after;
        } else if let (Some(base), Some(after)) = (open.pop(), rest.strip_prefix('}')) {
            prefix.truncate(base);
            rest = after;
            if open.is_empty() {
                return;
            }
        } else {
            return;
        }
    }
}
