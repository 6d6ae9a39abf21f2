//! `ripieno options`: the options of a store.

use clap::Args;
use ripieno_stack::{OPTIONS, StackOption};
use serde_json::{Value, json};

use crate::table::fold;
use crate::terminal;

/// Flags of `ripieno options`.
#[derive(Debug, Args)]
pub(crate) struct OptionsFlags {
    /// Print one JSON array on stdout instead of a list
    #[arg(long)]
    json: bool,
}

/// Prints all options.
///
/// # Errors
/// Returns an error if stdout cannot be written to.
pub(crate) fn run(flags: &OptionsFlags) -> anyhow::Result<u8> {
    match flags.json {
        true => terminal::print(OPTIONS.iter().map(to_json).collect::<Value>())?,
        false => terminal::print(OPTIONS.iter().map(to_text).collect::<Vec<_>>().join("\n"))?,
    }
    Ok(0)
}

fn to_json(option: &StackOption) -> Value {
    let StackOption { name, value, default, .. } = option;
    json!({ "name": name, "value": value, "default": default, "help": option.help() })
}

fn to_text(option: &StackOption) -> String {
    let StackOption { name, value, default, .. } = option;
    let help = fold(option.help()).replace('\n', "\n    ");
    format!("{name} <{value}> [default: {default}]\n    {help}")
}
