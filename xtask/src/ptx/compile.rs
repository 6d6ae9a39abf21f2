//! Compilation from source to PTX, and from PTX to SASS.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::child::compile;
use crate::ptx::Module;
use crate::ptx::sass::{self, Instruction};

/// Compiler flags, without the compute capability. Warnings are errors.
pub const FLAGS: &[&str] = &["-std=c++17", "-O3", "-ptx", "--Werror", "all-warnings"];

/// PTX version declared by the modules: the oldest that has every instruction used, so that drivers
/// since CUDA 12.7 accept it. The compiler declares its own version, which only equally new drivers
/// accept. The assembler rejects instructions that the version lacks.
pub const ISA: &str = "8.6";

/// A module, its compiler, and the output folder.
#[derive(Debug)]
pub struct Source<'a> {
    /// Folder of the compiler's programs.
    pub toolkit: &'a Path,
    pub module: &'a Module,
    /// Folder of the module.
    pub home: &'a Path,
    pub folder: &'a Path,
}

/// The compiler's output for a module.
#[derive(Debug)]
pub struct Compiled {
    pub ptx: String,
    /// Our source files that it read, from the module's folder.
    pub sources: Vec<String>,
}

/// The assembler's output for a kernel on one GPU.
#[derive(Debug, Default)]
pub struct Kernel {
    pub name: String,
    pub resources: Resources,
    pub sass: Vec<Instruction>,
}

/// Resources of one thread of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub registers: u64,
    pub stack_bytes: u64,
    /// Bytes of stores and loads together.
    pub spill_bytes: u64,
}

impl Source<'_> {
    /// Compiles to PTX for a compute capability.
    pub fn compile(&self, capability: u32) -> Result<Compiled> {
        let out = self.ptx(capability);
        let list = out.with_extension("d");
        let mut nvcc = self.program("nvcc");
        // In this folder, so that the compiler sees no absolute paths.
        nvcc.current_dir(self.home).args(FLAGS).arg(format!("-arch=compute_{capability}"));
        nvcc.args(["-I", self.module.include]).arg(self.module.file("cu")).arg("-o").arg(&out);
        compile(nvcc.args(["-MMD", "-MF"]).arg(&list))?;
        let read = |file: &Path| {
            fs::read_to_string(file).with_context(|| format!("nvcc left no {}", file.display()))
        };
        let ptx = with_isa(&read(&out)?, ISA)
            .with_context(|| format!("{} has no line .version", out.display()))?;
        fs::write(&out, &ptx).with_context(|| format!("cannot write {}", out.display()))?;
        Ok(Compiled { ptx, sources: own_sources(&read(&list)?) })
    }

    /// Assembles the kernels of this compute capability's PTX, which must have been compiled, for
    /// the GPU `sm`.
    pub fn assemble(&self, capability: u32, sm: u32) -> Result<Vec<Kernel>> {
        let cubin = self.folder.join(format!("{}.{capability}.sm_{sm}.cubin", self.module.name));
        let mut ptxas = self.program("ptxas");
        ptxas.arg("-v").arg(format!("-arch=sm_{sm}")).arg(self.ptx(capability));
        let said = compile(ptxas.arg("-o").arg(&cubin))?;
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        let all = resources(&said);
        if all.is_empty() {
            bail!("ptxas said nothing about the kernels' registers, but this:\n{said}");
        }
        let dump = compile(self.program("cuobjdump").arg("-sass").arg(&cubin))?;
        let text = String::from_utf8_lossy(&dump.stdout).into_owned();
        let listing = cubin.with_extension("sass");
        fs::write(&listing, &text)
            .with_context(|| format!("cannot write {}", listing.display()))?;
        let kernel = |(name, resources): (String, Resources)| {
            let sass = sass::parse(sass::function(&text, &name));
            Kernel { name, resources, sass }
        };
        Ok(all.into_iter().map(kernel).collect())
    }

    /// Returns a command for a program of the compiler; they find each other on the PATH.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.toolkit.join(name));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.toolkit.display()));
        command
    }

    fn ptx(&self, capability: u32) -> PathBuf {
        self.folder.join(format!("{}.compute_{capability}.ptx", self.module.name))
    }
}

/// Replaces the version that the PTX declares.
fn with_isa(ptx: &str, isa: &str) -> Option<String> {
    const WORD: &str = "\n.version ";
    let (before, rest) = ptx.split_once(WORD)?;
    let (_, after) = rest.split_once('\n')?;
    Some(format!("{before}{WORD}{isa}\n{after}"))
}

/// Returns our files in a make rule: the compiler's own headers have absolute paths.
fn own_sources(rule: &str) -> Vec<String> {
    let (_, files) = rule.split_once(" : ").unwrap_or_default();
    let files = files.split_whitespace().filter(|word| *word != "\\");
    let mut own: Vec<String> =
        files.filter(|file| Path::new(file).is_relative()).map(ToOwned::to_owned).collect();
    own.sort();
    own.dedup();
    own
}

/// Parses the output of `ptxas -v`, for each kernel by name.
fn resources(said: &str) -> Vec<(String, Resources)> {
    let kernels = said.split("Compiling entry function '").skip(1);
    let mut all: Vec<_> = kernels
        .filter_map(|part| {
            let (name, rest) = part.split_once('\'')?;
            Some((name.to_owned(), resources_of(rest)?))
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn resources_of(said: &str) -> Option<Resources> {
    // The kernel's own frame comes first; those of subroutines follow.
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
ptxas info    : Used 128 registers, used 0 barriers, 88 bytes cumulative stack size
ptxas info    : Compiling entry function 'another' for 'sm_90'
ptxas info    : Function properties for another
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers";
        let first = Resources { registers: 128, stack_bytes: 88, spill_bytes: 272 };
        let second = Resources { registers: 48, ..Resources::default() };
        let wanted = [("another".to_owned(), second), ("gio_kernel".to_owned(), first)];
        assert_eq!(resources(said), wanted);
        assert!(resources("ptxas info    : Used 128 registers").is_empty());
    }

    #[test]
    fn the_version_is_replaced_and_nothing_else() {
        let ptx = "// .version\n.version 9.0\n.target sm_90\n";
        assert_eq!(with_isa(ptx, "8.6").unwrap(), "// .version\n.version 8.6\n.target sm_90\n");
        assert_eq!(with_isa("// nothing\n", "8.6"), None);
    }

    #[test]
    fn the_compilers_own_headers_are_no_sources() {
        let rule = "/t/a.ptx : ptx/a.cu \\\n    /opt/cuda/x.h \\\n    include/b.cuh \\\n    a.h\n";
        assert_eq!(own_sources(rule), ["a.h", "include/b.cuh", "ptx/a.cu"]);
    }
}
