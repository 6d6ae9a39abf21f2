//! `--executor` and what goes with a GPU: which one, how much of it, and the route that is wanted.

use std::fmt;

use crate::problem::Problem;

use super::raw::{GpuFlags, LaunchFlag, ReplayFlags, RequireFlag};

/// SMs of the I/O kernel, where nobody asked for a number.
pub(crate) const IO_SMS: u32 = 4;

/// What is used of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuChoice {
    /// Its number.
    pub(crate) ordinal: u32,
    /// SMs of the I/O kernel.
    pub(crate) io_sms: u32,
    /// The I/O kernel stays on them; else it is launched for each batch.
    pub(crate) is_resident: bool,
}

/// Who runs the I/O kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Executor {
    /// Threads of their own.
    Host,
    /// The thread that waits.
    Inline,
    /// A GPU.
    Cuda(GpuChoice),
}

/// The way of the data between drive and KV pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// The drive reads and writes the GPU's memory.
    Direct,
    /// The drive reads and writes pinned host memory, which is copied from and to the GPU.
    Staged,
    /// The pool is in host memory.
    Host,
}

impl Route {
    /// All of them, the best first.
    pub(crate) const ALL: [Self; 3] = [Self::Direct, Self::Staged, Self::Host];

    /// What `--require` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Staged => "staged",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Executor {
    /// What `--executor` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Inline => "inline",
            Self::Cuda(_) => "cuda",
        }
    }

    /// The GPU, if there is one.
    pub(crate) fn gpu(self) -> Option<GpuChoice> {
        match self {
            Self::Cuda(choice) => Some(choice),
            Self::Host | Self::Inline => None,
        }
    }

    /// Checks `--executor` together with the flags that only a GPU has.
    pub(super) fn check(flags: &ReplayFlags) -> Result<Self, Problem> {
        let GpuFlags { gpu, io_sms } = flags.gpu;
        let name = flags.executor.as_str();
        match name {
            "cuda" => {
                let choice = choice(&flags.gpu)?;
                let is_resident = flags.launch == Some(LaunchFlag::Resident);
                if flags.memory != "host" {
                    return Err(Problem::new(
                        format!(
                            "--memory {}: with --executor cuda, queues and KV pool go to the \
                             GPU's memory, or to pinned host memory",
                            flags.memory
                        ),
                        "leave it out; --require says which route of the data is wanted",
                    ));
                }
                return Ok(Self::Cuda(GpuChoice { is_resident, ..choice }));
            }
            "host" | "inline" => {}
            _ => {
                return Err(Problem::new(
                    format!("--executor {name}: no such executor"),
                    "use --executor host, --executor inline or --executor cuda",
                ));
            }
        }
        let only_cuda = [
            ("--gpu", gpu.is_some()),
            ("--io-sms", io_sms.is_some()),
            ("--launch", flags.launch.is_some()),
        ];
        if let Some((flag, _)) = only_cuda.iter().find(|(_, given)| *given) {
            return Err(Problem::new(
                format!("{flag}: with --executor {name}, no GPU runs the I/O kernel"),
                "leave it out, or use --executor cuda",
            ));
        }
        if let Some(route) = flags.require.map(required).filter(|route| *route != Route::Host) {
            return Err(Problem::new(
                format!("--require {route}: with --executor {name}, data goes to host memory"),
                "use --executor cuda; ripieno doctor shows what this machine can do",
            ));
        }
        Ok(if name == "inline" { Self::Inline } else { Self::Host })
    }
}

/// Checks the flags that replay and doctor share.
pub(super) fn choice(flags: &GpuFlags) -> Result<GpuChoice, Problem> {
    let io_sms = flags.io_sms.unwrap_or(IO_SMS);
    if io_sms == 0 {
        return Err(Problem::new(
            "--io-sms 0: the I/O kernel needs at least one SM",
            format!("leave it out for {IO_SMS}"),
        ));
    }
    Ok(GpuChoice { ordinal: flags.gpu.unwrap_or(0), io_sms, is_resident: false })
}

/// What `--require` asks for.
pub(super) fn required(flag: RequireFlag) -> Route {
    match flag {
        RequireFlag::Direct => Route::Direct,
        RequireFlag::Staged => Route::Staged,
        RequireFlag::Host => Route::Host,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::raw::{Command, Raw};

    fn check(line: &str) -> Result<Executor, Problem> {
        let words = ["ripieno", "replay"].into_iter().chain(line.split_whitespace());
        let Command::Replay(flags) = Raw::try_parse_from(words).unwrap().command else {
            panic!("replay was asked for")
        };
        Executor::check(&flags)
    }

    #[test]
    fn the_gpu_is_chosen_in_full_or_by_default() {
        assert_eq!(check("").unwrap(), Executor::Host);
        assert_eq!(check("--executor inline --require host").unwrap(), Executor::Inline);
        let default = GpuChoice { ordinal: 0, io_sms: 4, is_resident: false };
        assert_eq!(check("--executor cuda").unwrap(), Executor::Cuda(default));
        let chosen = GpuChoice { ordinal: 2, io_sms: 16, is_resident: true };
        let line = "--executor cuda --gpu 2 --io-sms 16 --launch resident --require staged";
        assert_eq!(check(line).unwrap(), Executor::Cuda(chosen));
        let line = "--executor cuda --launch per-batch";
        assert_eq!(check(line).unwrap(), Executor::Cuda(default));
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for (line, wanted) in [
            ("--executor mpi", "no such executor"),
            ("--gpu 0", "no GPU runs"),
            ("--io-sms 2", "no GPU runs"),
            ("--launch resident --executor inline", "no GPU runs"),
            ("--require direct", "host memory"),
            ("--require staged --executor inline", "host memory"),
            ("--executor cuda --io-sms 0", "at least one SM"),
            ("--executor cuda --device vfio:65:00.0 --memory peer:00:05.0/2", "--memory peer"),
        ] {
            let problem = check(line).unwrap_err();
            assert!(problem.to_string().contains(wanted), "{line}: {problem}");
            assert!(!problem.hint().is_empty(), "{line}");
        }
    }
}
