//! Rules about documentation: that it exists, is linked, and has valid links.

use std::collections::HashMap;

use crate::Rule;
use crate::tree::{File, Tree, Violation, numbered};

pub const RULES: &[Rule] = &[
    Rule {
        name: "crates say what they are",
        check: crates_say_what_they_are,
        sample: || {
            let good = "//! A.\n//!\n//! # Architecture\n//! a\n//! # Invariants\n//! b\n\
                        //! # Not implemented\n//! c\n";
            let empty = good.replace("//! c\n", "//!\n");
            let missing = good.replace("# Invariants", "");
            let elsewhere = "//! A.\nmod x {\n//! # Architecture\n}\n";
            vec![
                ("a/src/lib.rs", good.into()),
                ("b/src/lib.rs", empty),
                ("c/src/lib.rs", missing),
                ("d/src/lib.rs", elsewhere.into()),
                ("d/src/main.rs", String::new()),
            ]
        },
        finds: &[
            "b/src/lib.rs:1",
            "c/src/lib.rs:1",
            "d/src/lib.rs:1",
            "d/src/lib.rs:1",
            "d/src/lib.rs:1",
        ],
    },
    Rule {
        name: "decisions are listed",
        check: decisions_are_listed,
        sample: || {
            let full = "Status: accepted\n\n## Context\n\n## Decision\n\n## Consequences\n";
            vec![
                (
                    "docs/adr/README.md",
                    "[one](0001-one.md) 0002-two.md [z](0000-template.md)".into(),
                ),
                ("docs/adr/0000-template.md", full.into()),
                ("docs/adr/0001-one.md", full.into()),
                ("docs/adr/0002-two.md", full.into()),
                ("docs/adr/three.md", full.replace("accepted", "maybe")),
                ("docs/adr/0001-four.md", full.replace("## Decision", "")),
            ]
        },
        finds: &[
            "docs/adr/0001-four.md:1", // Not listed,
            "docs/adr/0001-four.md:1", // no decision,
            "docs/adr/0001-four.md:1", // and a number that is taken.
            "docs/adr/0002-two.md:1",
            "docs/adr/three.md:1", // Not listed,
            "docs/adr/three.md:1", // no number,
            "docs/adr/three.md:1", // and no known status.
        ],
    },
    Rule {
        name: "pages are in the book",
        check: pages_are_in_the_book,
        sample: || {
            let summary = "- [A](a.md)\n  - [B](b/c.md)\n[R](../README.md)\n";
            vec![
                ("docs/SUMMARY.md", summary.into()),
                ("docs/a.md", String::new()),
                ("docs/b/c.md", String::new()),
                ("docs/c.md", String::new()),
                ("docs/b/a.md", String::new()),
            ]
        },
        finds: &["docs/b/a.md:1", "docs/c.md:1"],
    },
    Rule {
        name: "links lead somewhere",
        check: links_lead_somewhere,
        sample: || {
            let links = "[a](b.md) [a](docs/b.md#a-heading) [a](https://x.example/) [s](#self)\n\
                         [a](docs/b.md#no-heading)\n\
                         `[a](code.md)` [x]: y\n\
                         ```\n[a](block.md)\n```\n\
                         <img src=\"docs/none.svg\"> <a href='docs'>\n\
                         [ref]: docs/none.md\n\
                         # Self\n";
            let up =
                "# A `heading`!\n[up](../a.md) [out](../../a.md) [t](b.md \"title\") ![i](c.svg)\n";
            vec![("a.md", links.into()), ("docs/b.md", up.into())]
        },
        finds: &["a.md:1", "a.md:2", "a.md:7", "a.md:8", "docs/b.md:2", "docs/b.md:2"],
    },
    Rule {
        name: "tests that a page names exist",
        check: named_tests_exist,
        sample: || {
            let page = "# Testing\n`other`\n## Faults of others\n| a | b | `test_a`, `b` |\n\
                        | a | b | `test_c` |\n## More\n`another`\n";
            vec![
                ("docs/design/testing.md", page.into()),
                ("python/tests/test_a.py", "def test_a():\ndef test_cd():\n".into()),
                ("a/tests/a.rs", "    fn b() {\n".into()),
            ]
        },
        finds: &["docs/design/testing.md:5"],
    },
];

fn crates_say_what_they_are(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in tree.files().iter().filter(|file| file.path.ends_with("src/lib.rs")) {
        let docs: Vec<&str> =
            file.text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim).collect();
        for wanted in ["Architecture", "Invariants", "Not implemented"] {
            let heading = |line: &str| line.starts_with('#');
            let is_wanted =
                |line: &&str| heading(line) && line.trim_start_matches('#').trim() == wanted;
            let mut after = docs.iter().skip_while(|line| !is_wanted(line)).skip(1);
            let content =
                after.by_ref().take_while(|line| !heading(line)).any(|line| !line.is_empty());
            if !content {
                let message = format!(
                    "no section `//! # {wanted}` with something in it; it is the first thing a \
                     reader of the crate looks for: write it at the top of the file"
                );
                found.push(Violation::new(file, 1, message));
            }
        }
    }
    found
}

fn named_tests_exist(tree: &Tree) -> Vec<Violation> {
    let Some(page) = tree.file("docs/design/testing.md") else { return Vec::new() };
    let exists = |name: &str| {
        let heads = [format!("fn {name}("), format!("def {name}(")];
        tree.files().iter().any(|file| heads.iter().any(|head| file.text.contains(head)))
    };
    let mut found = Vec::new();
    let lines = numbered(&page.text).skip_while(|(_, line)| *line != "## Faults of others").skip(1);
    for (number, line) in lines.take_while(|(_, line)| !line.starts_with('#')) {
        for name in line.split('`').skip(1).step_by(2).filter(|name| !exists(name)) {
            found.push(Violation::new(page, number, format!("no test is called {name}")));
        }
    }
    found
}

fn decisions_are_listed(tree: &Tree) -> Vec<Violation> {
    let list = tree.file("docs/adr/README.md").map_or("", |file| &file.text);
    let mut numbers = HashMap::new();
    let mut found = Vec::new();
    let adrs = tree.with(&["md"]).filter(|file| file.folder() == "docs/adr");
    for file in adrs.filter(|file| file.name() != "README.md") {
        let mut wrong = |message: String| found.push(Violation::new(file, 1, message));
        if !list.contains(&format!("]({})", file.name())) {
            wrong("a decision nobody finds: link it from docs/adr/README.md".into());
        }
        let number = file.name().split('-').next().unwrap_or_default();
        if number.len() != 4 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            wrong("decisions are cited by number: name the file NNNN-subject.md".into());
        } else if let Some(other) = numbers.insert(number, file.name()) {
            wrong(format!("{other} has this number, too: take the next free one"));
        }
        let status = file.text.lines().find_map(|line| line.strip_prefix("Status: "));
        let known = |status: &str| {
            ["proposed", "accepted", "withdrawn"].contains(&status)
                || status.starts_with("superseded by ")
        };
        if !status.is_some_and(known) {
            wrong(
                "no line `Status: proposed`, `accepted`, `withdrawn` or `superseded by NNNN`; \
                 without it nobody knows whether this holds: add it under the title"
                    .into(),
            );
        }
        for section in ["Context", "Decision", "Consequences"] {
            let heading = format!("## {section}");
            if !file.text.lines().any(|line| line.trim_end() == heading) {
                wrong(format!("no `{heading}`; without it the reason is lost: add the section"));
            }
        }
    }
    found
}

fn pages_are_in_the_book(tree: &Tree) -> Vec<Violation> {
    const SUMMARY: &str = "docs/SUMMARY.md";
    let Some(summary) = tree.file(SUMMARY) else { return Vec::new() };
    let mut found = Vec::new();
    for file in tree.with(&["md"]).filter(|file| file.path != SUMMARY) {
        let Some(path) = file.path.strip_prefix("docs/") else { continue };
        if !summary.text.contains(&format!("]({path})")) {
            let message = format!(
                "a page that is not in the book; its search does not find it: add it to {SUMMARY}"
            );
            found.push(Violation::new(file, 1, message));
        }
    }
    found
}

fn links_lead_somewhere(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in tree.with(&["md"]) {
        for (number, line) in numbered(&prose(&file.text)) {
            for target in targets(line) {
                if let Some(why) = broken(tree, file, target) {
                    let message = format!(
                        "link to `{target}`, {why}; a dead link costs every reader: \
                         correct it, or write the thing it promises"
                    );
                    found.push(Violation::new(file, number, message));
                }
            }
        }
    }
    found
}

/// Returns Markdown with code blocks and spans blanked out.
fn prose(text: &str) -> String {
    let (mut prose, mut fence) = (String::new(), None);
    for line in text.lines() {
        let mark = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|fence| mark.starts_with(fence));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => {
                // Every second part is between backticks.
                line.split('`').step_by(2).for_each(|part| prose.push_str(part));
            }
            _ => {}
        }
        prose.push('\n');
    }
    prose
}

/// Returns the targets of links in a line: `](x)`, `[a]: x`, `src="x"` and `href="x"`.
fn targets(line: &str) -> Vec<&str> {
    let mut targets = Vec::new();
    for (mark, ends) in [
        ("](", [')', ' ', ')']),
        ("src=\"", ['"'; 3]),
        ("href=\"", ['"'; 3]),
        ("href='", ['\''; 3]),
    ] {
        for (at, _) in line.match_indices(mark) {
            let target = line[at + mark.len()..].split(ends).next();
            targets.extend(target.map(|target| target.trim_matches(['<', '>'])));
        }
    }
    if line.starts_with('[')
        && let Some((_, target)) = line.split_once("]: ")
    {
        targets.extend(target.split_whitespace().next());
    }
    targets
}

/// Returns the reason why a link is broken, if that is known without the network.
fn broken(tree: &Tree, from: &File, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
    let full = if path.is_empty() {
        from.path.clone()
    } else {
        match resolved(from.folder(), path) {
            Some(full) if tree.contains(&full) => full,
            Some(full) => return Some(format!("but there is no `{full}`")),
            None => return Some("outside the repository".into()),
        }
    };
    let page = tree.file(&full).filter(|file| file.is(&["md"]));
    let (Some(anchor), Some(page)) = (anchor, page) else { return None };
    let exists = headings(&page.text).any(|heading| heading == anchor);
    (!exists).then(|| format!("but `{full}` has no heading `#{anchor}`"))
}

/// Returns `path` relative to `folder`, without dots; `None` above the root.
fn resolved(folder: &str, path: &str) -> Option<String> {
    let base = if path.starts_with('/') { "" } else { folder };
    let mut parts: Vec<&str> = Vec::new();
    for part in base.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the anchors of a page, as GitHub generates them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter(|line| line.starts_with('#')).map(|line| {
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let title = line.trim_start_matches('#').trim().to_lowercase();
        title.chars().filter(kept).collect::<String>().replace(' ', "-")
    })
}
