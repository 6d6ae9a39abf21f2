//! The `nvme-bind` command; the library implements it.

use std::process::ExitCode;

fn main() -> ExitCode {
    nvme_bind::run()
}
