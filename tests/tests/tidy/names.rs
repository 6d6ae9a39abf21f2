//! Rules about words: terms a reader from the field would have to look up, and how sentences begin;
//! and the crates that the picture in the architecture document shows.

use crate::Rule;
use crate::tree::{File, Tree, Violation, line_of};

pub const RULES: &[Rule] = &[
    Rule {
        name: "words of the field",
        check: words_of_the_field,
        sample: || {
            let old = "const PATIENCE: u8 = 1;\nfn mend_it() {}\nrecommended, impatience\n";
            let exempt = EXEMPT.iter().map(|&(path, _)| (path, old.to_owned()));
            let mut files = vec![("a.rs", old.to_owned()), ("b.md", "It suffers.".into())];
            files.extend(exempt);
            files
        },
        finds: &["a.rs:1", "a.rs:2", "b.md:1"],
    },
    Rule {
        name: "sentences begin with a noun or a verb",
        check: sentences_begin_with_a_noun_or_a_verb,
        sample: || {
            let code = "/// What is read.\n// Bytes. Whether they are right\n\
                        //! Bytes of what is read. What now?\nlet what = \"What is\";\n";
            let text = "# What it is\nA thing.\nAs for another one, it is. What Whether\n";
            vec![("a.rs", code.into()), ("b.py", "# What is\n".into()), ("c.md", text.into())]
        },
        finds: &["a.rs:1", "a.rs:2", "b.py:1", "c.md:3"],
    },
    Rule {
        name: "the picture shows all crates",
        check: the_picture_shows_all_crates,
        sample: || {
            let package = |name: &str| format!("[package]\nname = \"{name}\"\n");
            let picture = "<svg>\n<text class=\"crate\" x=\"1\">shown</text>\n\
                           <text class=\"crate\" x=\"2\">removed</text>\n<text>other</text>\n";
            vec![
                ("Cargo.toml", "[workspace]\n".into()),
                ("a/Cargo.toml", package("shown")),
                ("b/Cargo.toml", package("hidden")),
                (PICTURE, picture.into()),
            ]
        },
        finds: &["b/Cargo.toml:1", "docs/pictures/crates.svg:3"],
    },
];

/// Prefixes of words that only this project would use, and their replacements.
const WORDS: &[(&str, &str)] = &[
    ("aloft", "in flight"),
    ("drib", "batch minimum"),
    ("ferr", "a copy"),
    ("mend", "fix"),
    ("misfortune", "fault"),
    ("patience", "timeout"),
    ("spoil", "corrupt, or poison"),
    ("suffer", "have a fault"),
];

/// Files that may use them, and why.
const EXEMPT: &[(&str, &str)] = &[("tests/tests/tidy/names.rs", "this list")];

/// Beginnings of sentences that name neither a thing nor an action.
const CLAUSES: &[&str] = &["What ", "Whether ", "As for "];

const PICTURE: &str = "docs/pictures/crates.svg";

fn words_of_the_field(tree: &Tree) -> Vec<Violation> {
    let written = &["rs", "cuh", "cu", "h", "hpp", "cpp", "toml", "sh", "md", "svg"];
    let mut found = Vec::new();
    let files = tree.with(written);
    for file in files.filter(|file| EXEMPT.iter().all(|&(path, _)| path != file.path)) {
        for (number, line) in file.lines() {
            let line = line.to_lowercase();
            let mut words = line.split(|c: char| !c.is_alphanumeric());
            let old = words.find_map(|word| WORDS.iter().find(|&(old, _)| word.starts_with(old)));
            found.extend(old.map(|(old, new)| {
                let message = format!(
                    "a word that begins with `{old}`; a reader from the field does not know what \
                     it stands for: write {new}"
                );
                Violation::new(file, number, message)
            }));
        }
    }
    found
}

fn sentences_begin_with_a_noun_or_a_verb(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in tree.with(&["rs", "cuh", "cu", "h", "hpp", "cpp", "py", "md"]) {
        let is_text = file.path.ends_with(".md");
        let marks: &[&str] =
            if file.path.ends_with(".py") { &["#"] } else { &["///", "//!", "//"] };
        for (number, line) in file.lines() {
            let line = line.trim_start();
            let prose = match is_text {
                true => Some(line).filter(|line| !line.starts_with('#')),
                false => marks.iter().find_map(|mark| line.strip_prefix(mark)),
            };
            let Some(prose) = prose.filter(|prose| !prose.contains('?')) else { continue };
            let mut sentences = prose.split(". ").map(str::trim_start);
            if sentences.any(|text| CLAUSES.iter().any(|clause| text.starts_with(clause))) {
                let message = "a sentence that begins with a clause; a reader looks for the thing: \
                               begin with its name, or with a verb";
                found.push(Violation::new(file, number, message));
            }
        }
    }
    found
}

fn the_picture_shows_all_crates(tree: &Tree) -> Vec<Violation> {
    let Some(picture) = tree.file(PICTURE) else { return Vec::new() };
    let name = |file: &File| {
        let package = file.text.split("[package]").nth(1)?;
        Some(package.split("name = \"").nth(1)?.split('"').next()?.to_owned())
    };
    let manifests = tree.files().iter().filter(|file| file.name() == "Cargo.toml");
    let crates: Vec<_> = manifests.filter_map(|file| Some((file, name(file)?))).collect();
    let shown = picture.text.match_indices("class=\"crate\"").filter_map(|(at, _)| {
        let text = picture.text[at..].split('>').nth(1)?.split('<').next()?;
        Some((at, text))
    });
    let shown: Vec<(usize, &str)> = shown.collect();
    let missing = crates.iter().filter(|(_, name)| shown.iter().all(|(_, text)| text != name));
    let mut found: Vec<Violation> = missing
        .map(|(file, name)| {
            let message = format!(
                "{PICTURE} does not show `{name}`, and a reader takes the picture for the whole: \
                 add it there, and to the table of docs/ARCHITECTURE.md"
            );
            Violation::new(file, 1, message)
        })
        .collect();
    let removed = shown.iter().filter(|(_, text)| crates.iter().all(|(_, name)| text != name));
    found.extend(removed.map(|&(at, text)| {
        let message = format!("it shows `{text}`, and there is no such crate: remove it");
        Violation::new(picture, line_of(&picture.text, at), message)
    }));
    found
}
