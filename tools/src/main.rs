//! The `ripieno` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    ripieno::run()
}
