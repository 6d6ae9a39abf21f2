//! The options of a store, as flags of commands, and `ripieno options`.

use std::marker::PhantomData;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, error::ErrorKind};
use ripieno_stack::{OPTIONS, StackConfig, StackOption};
use serde_json::{Value, json};

use crate::table::fold;
use crate::terminal;

/// The flags of a command that takes options of a store.
pub(crate) trait Takes {
    /// Names of the options, each with its default there; "" is that of [`OPTIONS`].
    const OPTIONS: &'static [(&'static str, &'static str)];
}

/// The options of a store among the flags of a command. Their names, values and help are those of
/// [`OPTIONS`].
#[derive(Debug, Clone)]
pub(crate) struct StoreFlags<T> {
    pub(crate) config: StackConfig,
    of: PhantomData<T>,
}

impl<T> From<StackConfig> for StoreFlags<T> {
    fn from(config: StackConfig) -> Self {
        Self { config, of: PhantomData }
    }
}

impl<T: Takes> Args for StoreFlags<T> {
    fn augment_args(command: Command) -> Command {
        command.args(T::OPTIONS.iter().map(|(name, default)| flag(name, default)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<T: Takes> FromArgMatches for StoreFlags<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::from(StackConfig::default());
        flags.update_from_arg_matches(matches).map(|()| flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        T::OPTIONS
            .iter()
            .try_for_each(|(name, _)| {
                let text = matches.get_one::<String>(name);
                text.map_or(Ok(()), |text| self.config.set(name, text))
            })
            .map_err(|why| clap::Error::raw(ErrorKind::ValueValidation, why))
    }
}

fn flag(name: &str, default: &str) -> Arg {
    let option = OPTIONS.iter().find(|option| option.name == name).expect("it is an option");
    let default = if default.is_empty() { option.default } else { default };
    // All of it is in `ripieno options`.
    let help = option.help().split(". ").next().unwrap_or_default().trim_end_matches('.');
    let arg = Arg::new(option.name)
        .long(&*option.name.replace('_', "-").leak())
        .help(format!("{help} [default: {default}]"))
        .help_heading("Store");
    match option.value.starts_with(char::is_lowercase) {
        // The words as the value's name would be wider than their column.
        true => {
            arg.value_name("WORD").value_parser(PossibleValuesParser::new(option.value.split('|')))
        }
        false => arg.value_name(option.value).value_parser(|text: &str| {
            (option.set)(&mut StackConfig::default(), text).map(|()| text.to_owned())
        }),
    }
}

/// Flags of `ripieno options`.
#[derive(Debug, Args)]
pub(crate) struct OptionsFlags {
    /// Print one JSON array on stdout instead of a list
    #[arg(long)]
    json: bool,
}

/// Prints all options.
pub(crate) fn run(flags: &OptionsFlags) -> anyhow::Result<u8> {
    match flags.json {
        true => terminal::print(OPTIONS.iter().map(to_json).collect::<Value>())?,
        false => terminal::print_text(&OPTIONS.iter().map(to_text).collect::<Vec<_>>().join("\n"))?,
    }
    Ok(0)
}

fn to_json(option: &StackOption) -> Value {
    let StackOption { name, value, default, .. } = option;
    json!({ "name": name, "value": value, "default": default, "help": option.help() })
}

fn to_text(option: &StackOption) -> String {
    let StackOption { name, value, default, .. } = option;
    let help = fold(option.help(), 4).replace('\n', "\n    ");
    format!("{name} <{value}> [default: {default}]\n    {help}")
}
