//! Manual pages and completion scripts, made from the command lines of both programs.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::problem::Problem;
use crate::terminal::{self, say};

/// Flags of `ripieno completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsFlags {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,

    /// The program whose command line is completed
    #[arg(value_name = "PROGRAM", default_value = "ripieno")]
    program: Program,
}

/// Flags of `ripieno man`.
#[derive(Debug, Args)]
pub(crate) struct ManFlags {
    /// Directory for the pages of ripieno, nvme-bind and all their commands; made if it is missing
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Program {
    Ripieno,
    NvmeBind,
}

/// Prints a completion script. `ripieno` is the command line of this program.
pub(crate) fn complete(flags: &CompletionsFlags, ripieno: Command) -> anyhow::Result<u8> {
    let mut command = match flags.program {
        Program::Ripieno => ripieno,
        Program::NvmeBind => nvme_bind::command(),
    };
    let (name, mut script) = (command.get_name().to_owned(), Vec::new());
    clap_complete::generate(flags.shell, &mut command, name, &mut script);
    terminal::print(String::from_utf8(script)?.trim_end())?;
    Ok(0)
}

/// Prints the page of `ripieno`, the command line of this program, or writes all pages.
pub(crate) fn write(flags: &ManFlags, ripieno: Command) -> anyhow::Result<u8> {
    match &flags.dir {
        None => {
            let mut page = Vec::new();
            Man::new(ripieno.disable_help_subcommand(true)).render(&mut page)?;
            terminal::print(String::from_utf8(page)?.trim_end())?;
        }
        Some(dir) if ripieno.find_subcommand(dir).is_some() && !dir.exists() => {
            let name = dir.display();
            let hint = format!(
                "ripieno {name} --help shows what its page has; for a directory of this name, \
                 write ./{name}"
            );
            let what = format!("{name}: a directory for all pages is expected, and not a command");
            return Err(Problem::new(what, hint).into());
        }
        Some(dir) => {
            let programs = [ripieno, nvme_bind::command()];
            programs.into_iter().try_for_each(|command| write_all(dir, command))?;
            say(format_args!("all pages are in {}", dir.display()));
        }
    }
    Ok(0)
}

fn write_all(dir: &Path, command: Command) -> anyhow::Result<()> {
    let wrote = fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(command, dir));
    wrote.map_err(|error| {
        let hint = "name a directory that exists or can be made, and can be written to";
        Problem::new(format!("{}: {error}", dir.display()), hint).into()
    })
}
