//! The rule about planted bugs: the lists in tests/mutants follow the code.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::Rule;
use crate::tree::{Tree, Violation, line_of};

pub const RULES: &[Rule] = &[Rule {
    name: "planted bugs apply",
    check: planted_bugs_apply,
    sample: || {
        let entry = |name: &str, file: &str, find: &str| {
            format!(
                "[[mutant]]\nname = '{name}'\nconsequence = 'c'\nfile = '{file}'\n\
                 find = '{find}'\nreplace = 'z'\ntest = 'cargo test -p a'\n"
            )
        };
        let good = entry("good", "a.rs", "once");
        let bad = [entry("twice", "a.rs", "two"), entry("gone", "b.rs", "x")].concat();
        let same = [good.clone(), entry("good", "a.rs", "never")].concat();
        let switched = |name| entry(name, "a.rs", "once").replace("'z'", "'PLANTED'");
        vec![
            ("a.rs", "once two two".into()),
            ("tests/mutants/a.toml", [good, bad].concat()),
            ("tests/mutants/b.toml", same),
            ("tests/mutants/c.toml", "[[mutant]]\nname = 'c'\n".into()),
            ("tests/mutants/d.toml", [switched("on"), switched("off")].concat()),
            ("other.toml", "name = 'no list'".into()),
        ]
    },
    finds: &[
        "tests/mutants/a.toml:9",  // Occurs twice,
        "tests/mutants/a.toml:16", // in a file that does not exist,
        "tests/mutants/b.toml:2",  // and a name that exists,
        "tests/mutants/b.toml:9",  // also in the same list,
        "tests/mutants/b.toml:9",  // and for text that does not occur.
        "tests/mutants/c.toml:1",  // No list.
        "tests/mutants/d.toml:9",  // Its text is gone when the one before is planted.
    ],
}];

#[derive(Deserialize)]
struct List {
    mutant: Vec<Mutant>,
}

#[derive(Deserialize)]
struct Mutant {
    name: String,
    file: String,
    find: String,
    replace: String,
    test: String,
}

fn planted_bugs_apply(tree: &Tree) -> Vec<Violation> {
    let (mut found, mut names) = (Vec::new(), Vec::new());
    for file in tree.with(&["toml"]).filter(|file| file.folder() == "tests/mutants") {
        let list: List = match basic_toml::from_str(&file.text) {
            Ok(list) => list,
            Err(error) => {
                found.push(Violation::new(file, 1, format!("not a list of mutants: {error}")));
                continue;
            }
        };
        let mut from = 0;
        // Those with a switch are planted together.
        let mut planted: BTreeMap<String, String> = BTreeMap::new();
        for mutant in list.mutant {
            // In the order of the file; the search continues after the previous entry.
            from += file.text[from..].find(&mutant.name).unwrap_or(0);
            let line = line_of(&file.text, from);
            from += mutant.name.len();
            let mut wrong = |message: String| found.push(Violation::new(file, line, message));
            if names.contains(&mutant.name) {
                wrong(format!("`{}` exists already: a name says which bug survived", mutant.name));
            }
            if !mutant.test.starts_with("cargo ") {
                wrong(
                    "the test is no cargo command, and `cargo xtask mutants` runs only those"
                        .into(),
                );
            }
            let has_switch = mutant.replace.contains("PLANTED");
            let right = tree.file(&mutant.file).map(|target| &target.text);
            let text = planted.get(&mutant.file).filter(|_| has_switch).or(right);
            match text.map(|text| (text.matches(&mutant.find).count(), text)) {
                Some((1, text)) if has_switch => {
                    let text = text.replacen(&mutant.find, &mutant.replace, 1);
                    planted.insert(mutant.file, text);
                }
                Some((1, _)) => {}
                Some((count, _)) => wrong(format!(
                    "`find` occurs {count} times in {}; it has to occur once: follow the code, or \
                     remove the bug that it can no longer have",
                    mutant.file
                )),
                None => wrong(format!("no file {}: name the file it is in now", mutant.file)),
            }
            names.push(mutant.name);
        }
    }
    found
}
