//! The `nvme-bind` command; everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    nvme_bind::run()
}
