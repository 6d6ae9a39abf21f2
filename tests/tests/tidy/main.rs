//! The house rules that a compiler does not check. One rule is one function from the tree to its
//! violations; `docs/design/testing.md` lists them in words.
//!
//! Every rule has a bad sample with the places of its violations, and is tested on it first: a rule
//! that cannot fail proves nothing about the tree.

mod code;
mod docs;
mod mask;
mod mutants;
mod names;
mod sizes;
mod structure;
mod text;
mod tree;

use tree::{Tree, Violation};

struct Rule {
    name: &'static str,
    check: fn(&Tree) -> Vec<Violation>,
    /// Files (path, text) that violate the rule, or nearly do.
    sample: fn() -> Vec<(&'static str, String)>,
    /// Places of all violations in the sample.
    finds: &'static [&'static str],
}

const RULES: &[&[Rule]] = &[
    text::RULES,
    code::RULES,
    docs::RULES,
    mutants::RULES,
    names::RULES,
    structure::RULES,
    sizes::RULES,
];

fn rules() -> impl Iterator<Item = &'static Rule> {
    RULES.iter().copied().flatten()
}

#[test]
fn every_rule_finds_what_is_wrong_with_its_sample() {
    for rule in rules() {
        let tree = Tree::of_samples((rule.sample)());
        let found = (rule.check)(&tree);
        let mut places: Vec<String> = found.iter().map(Violation::place).collect();
        places.sort();
        let mut wanted: Vec<&str> = rule.finds.to_vec();
        wanted.sort_unstable();
        assert!(!wanted.is_empty(), "{}: a rule with nothing to find", rule.name);
        assert_eq!(places, wanted, "{}: it said {found:#?}", rule.name);
    }
}

#[test]
fn the_tree_is_tidy() {
    let mut tree = Tree::of_repository();
    if std::env::var_os("RIPIENO_WRITE_SIZES").is_some() {
        tree.write(structure::LIMITS, &sizes::lowered(&tree));
    }
    // Guards against a walk that finds no files.
    for file in ["Cargo.toml", "README.md", "tests/tests/tidy/main.rs"] {
        assert!(tree.contains(file), "{file} is not among the {} files seen", tree.files().len());
    }
    let mut lines = Vec::new();
    for rule in rules() {
        let found = (rule.check)(&tree);
        if !found.is_empty() {
            lines.push(format!("\n{} ({}):", rule.name, found.len()));
            lines.extend(found.iter().map(|violation| format!("  {violation}")));
        }
    }
    assert!(lines.is_empty(), "the tree is not tidy\n{}\n", lines.join("\n"));
}
