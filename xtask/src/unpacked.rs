//! Programs of this machine, or Debian's, unpacked below `target/unpacked`: an installation could
//! remove packages of the machine, or start a service.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::programs::find;
use crate::{child, debian, folder};

/// A program that is unpacked if this machine has none.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    name: &'static str,
    /// Debian's package.
    package: &'static str,
}

/// Emulator of a machine.
pub const QEMU: Program = Program { name: "qemu-system-x86_64", package: "qemu-system-x86" };
/// Emulator of a CPU for one program.
pub const QEMU_USER: Program = Program { name: "qemu-x86_64", package: "qemu-user" };
/// Prometheus' checks of metrics and queries.
pub const PROMTOOL: Program = Program { name: "promtool", package: "prometheus" };

/// Minimum CPU of our programs as a QEMU model: exactly x86-64-v2. It has SSE4.2 and POPCNT, and no
/// AVX.
pub const LEAST_CPU: &str = "Nehalem";

/// Starts the unpacked program $0 with its unpacked libraries. An emulated program uses its own.
const START: &str = r#"#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/PACKAGE
libraries=$root/usr/lib/MACHINE-linux-gnu:$root/lib/MACHINE-linux-gnu
export LD_LIBRARY_PATH="$libraries" QEMU_UNSET_ENV=LD_LIBRARY_PATH
exec "$root/usr/bin/NAME" "$@"
"#;

impl Program {
    /// Returns its path, or its future path if it is not fetched yet.
    pub fn program(self) -> PathBuf {
        find(self.name).unwrap_or_else(|| self.own())
    }

    /// Returns its path if it is below `target/`.
    pub fn unpacked(self) -> Option<PathBuf> {
        find(self.name).is_none().then(|| self.own())
    }

    fn own(self) -> PathBuf {
        folder::target("unpacked").join(self.name)
    }

    /// Unpacks it, unless this machine has one or an earlier run did: about 20 MB.
    pub fn fetch(self) -> Result<()> {
        if self.program().is_file() {
            return Ok(());
        }
        let this = || format!("this machine lacks {}", self.name);
        debian::unpack_with_dependencies(&folder::target("unpacked"), self.package)
            .with_context(this)?;
        let script = START.replace("PACKAGE", self.package).replace("NAME", self.name);
        let script = script.replace("MACHINE", std::env::consts::ARCH);
        // Renamed only if it starts.
        let (own, part) = (self.own(), self.own().with_extension("part"));
        fs::write(&part, script).with_context(|| format!("cannot write {}", part.display()))?;
        fs::set_permissions(&part, Permissions::from_mode(0o755))?;
        child::output(Command::new(&part).arg("--version")).context("it does not start")?;
        fs::rename(&part, &own).with_context(|| format!("cannot write {}", own.display()))
    }
}
