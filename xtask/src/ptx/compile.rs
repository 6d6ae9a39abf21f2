//! From source to PTX, and from PTX to what a GPU runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

use crate::ptx::install::{Toolkit, shown};
use crate::ptx::sass::{self, Instruction};

/// A warning is an error; the compute capability is added.
pub const FLAGS: &[&str] = &["-std=c++17", "-O3", "-ptx", "--Werror", "all-warnings"];

/// The source is at fault, not the machine; the compiler said the rest.
#[derive(Debug)]
pub struct NotCompiled(String);

impl std::fmt::Display for NotCompiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` failed; its output is above", self.0)
    }
}

impl std::error::Error for NotCompiled {}

/// The kernel, its compiler, and where to put what comes of it.
#[derive(Debug)]
pub struct Source<'a> {
    pub toolkit: &'a Toolkit,
    pub kernels: &'a Path,
    pub folder: &'a Path,
}

/// What the assembler made of the kernel for one GPU.
#[derive(Debug, Default)]
pub struct Assembled {
    pub resources: Resources,
    pub sass: Vec<Instruction>,
}

/// What one thread of the kernel takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub registers: u64,
    pub stack_bytes: u64,
    /// Stores and loads together.
    pub spill_bytes: u64,
}

impl Source<'_> {
    /// PTX for a compute capability.
    pub fn compile(&self, capability: u32) -> Result<String> {
        let out = self.ptx(capability);
        let mut nvcc = self.toolkit.program("nvcc");
        // In that folder, so that no path of this machine is seen by the compiler.
        nvcc.current_dir(self.kernels).args(FLAGS).arg(format!("-arch=compute_{capability}"));
        nvcc.args(["-I", "include", "ptx/gio_kernel.cu", "-o"]).arg(&out);
        output(&mut nvcc)?;
        fs::read_to_string(&out).with_context(|| format!("nvcc left no {}", out.display()))
    }

    /// The PTX of that compute capability, which was compiled before, for the GPU `sm`.
    pub fn assemble(&self, capability: u32, sm: u32) -> Result<Assembled> {
        let cubin = self.folder.join(format!("gio_kernel.{capability}.sm_{sm}.cubin"));
        let mut ptxas = self.toolkit.program("ptxas");
        ptxas.arg("-v").arg(format!("-arch=sm_{sm}")).arg(self.ptx(capability));
        let said = output(ptxas.arg("-o").arg(&cubin))?;
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        let Some(resources) = resources(&said) else {
            bail!("ptxas said nothing about the kernel's registers, but this:\n{said}");
        };
        let dump = output(self.toolkit.program("cuobjdump").arg("-sass").arg(&cubin))?;
        let text = String::from_utf8_lossy(&dump.stdout).into_owned();
        let listing = cubin.with_extension("sass");
        fs::write(&listing, &text)
            .with_context(|| format!("cannot write {}", listing.display()))?;
        Ok(Assembled { resources, sass: sass::parse(&text) })
    }

    fn ptx(&self, capability: u32) -> PathBuf {
        self.folder.join(format!("gio_kernel.compute_{capability}.ptx"))
    }
}

fn output(command: &mut Command) -> Result<Output> {
    let line = shown(command);
    eprintln!("    $ {line}");
    let output = command.output().with_context(|| format!("cannot run `{line}`"))?;
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!(NotCompiled(line));
    }
    Ok(output)
}

/// The numbers in what `ptxas -v` says.
fn resources(said: &str) -> Option<Resources> {
    // The frame of the kernel itself; subroutines, which come later, have lines of their own.
    let frame = said.lines().find(|line| line.contains("bytes stack frame"))?;
    let mut bytes = frame.split(',').map(|part| part.trim().split(' ').next()?.parse().ok());
    let (stack_bytes, stores, loads): (u64, u64, u64) =
        (bytes.next()??, bytes.next()??, bytes.next()??);
    let (_, used) = said.split_once("Used ")?;
    let registers = used.split(' ').next()?.parse().ok()?;
    Some(Resources { registers, stack_bytes, spill_bytes: stores + loads })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assembler_says_what_a_thread_takes() {
        let said = "\
ptxas info    : Compiling entry function 'gio_kernel' for 'sm_90'
ptxas info    : Function properties for gio_kernel
    88 bytes stack frame, 132 bytes spill stores, 140 bytes spill loads
ptxas info    : Used 128 registers, used 0 barriers, 88 bytes cumulative stack size";
        let wanted = Resources { registers: 128, stack_bytes: 88, spill_bytes: 272 };
        assert_eq!(resources(said), Some(wanted));
        assert_eq!(resources("ptxas info    : Used 128 registers"), None);
    }
}
