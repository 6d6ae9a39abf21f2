//! The flags once they are checked: what is in here can be built.

use std::path::PathBuf;

use nvme_driver::platform::vfio::PciAddress;

use crate::model::{MODELS, Model, Shape};
use crate::problem::Problem;

use super::devices::{self, Devices, EmuChoice, MemoryChoice};
use super::gpu::{self, Executor, GpuChoice, Route, required};
use super::raw::{DescriptorsFlag, DoctorFlags, ProgressFlag, ReplayFlags, VerifyFlag};

/// Queue pairs one software controller offers.
pub(crate) const EMU_QUEUES: u16 = 64;
/// Entries a queue of a software controller may have (MQES).
pub(crate) const EMU_DEPTH: u32 = 1024;
/// Requests of a trial, enough that some are found stored.
const TRIAL_REQUESTS: usize = 24;
/// Blocks of its pool, few enough that requests go through it in windows.
const TRIAL_BLOCKS: u32 = 32;

/// Which bytes are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verify {
    /// All that is retrieved, and at the end all that is still stored.
    Full,
    /// Both ends of every retrieved object, and a share of the objects as a whole.
    Sampled,
    /// None.
    Off,
}

impl Verify {
    /// What `--verify` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Sampled => "sampled",
            Self::Off => "off",
        }
    }
}

/// How commands describe memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Descriptors {
    /// SGLs where the device has them.
    Auto,
    /// SGLs, or an error.
    Sgl,
    /// PRPs.
    Prp,
}

impl Descriptors {
    /// What `--descriptors` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Sgl => "sgl",
            Self::Prp => "prp",
        }
    }
}

/// `ripieno replay`, checked.
#[derive(Debug, Clone)]
pub(crate) struct ReplayArgs {
    /// The trace; a made workload if there is none.
    pub(crate) trace: Option<PathBuf>,
    /// Requests at the most.
    pub(crate) requests: Option<usize>,
    /// Of everything random.
    pub(crate) seed: u64,
    /// What is stored.
    pub(crate) shape: Shape,
    /// Blocks of the pool, if chosen.
    pub(crate) pool_blocks: Option<u32>,
    /// Which bytes to check.
    pub(crate) verify: Verify,
    /// What the objects are spread over.
    pub(crate) devices: Devices,
    /// Where queues, descriptors and the KV pool live.
    pub(crate) memory: MemoryChoice,
    /// Drives may hold data.
    pub(crate) overwrite: bool,
    /// Bytes for objects over all devices, if chosen.
    pub(crate) capacity: Option<u64>,
    /// Queue pairs of each device.
    pub(crate) queues: u16,
    /// Entries of each queue.
    pub(crate) depth: u32,
    /// Who runs the I/O kernel.
    pub(crate) executor: Executor,
    /// The route of the data, if only one will do.
    pub(crate) require: Option<Route>,
    /// Bytes up to which neighbours are merged.
    pub(crate) coalesce: u32,
    /// How memory is described.
    pub(crate) descriptors: Descriptors,
    /// JSON in place of the table.
    pub(crate) json: bool,
    /// A progress bar, if stderr is a terminal.
    pub(crate) progress: bool,
    /// No notes on stderr.
    pub(crate) quiet: bool,
}

/// `ripieno doctor`, checked.
#[derive(Debug, Clone)]
pub(crate) struct DoctorArgs {
    /// Drives; software controllers if there are none.
    pub(crate) drives: Vec<PciAddress>,
    /// What is used of a GPU.
    pub(crate) gpu: GpuChoice,
    /// The route that has to work.
    pub(crate) require: Option<Route>,
    /// JSON in place of the table.
    pub(crate) json: bool,
}

impl DoctorArgs {
    /// # Errors
    /// The first flag that makes no sense, or none together with another.
    pub(crate) fn check(flags: &DoctorFlags) -> Result<Self, Problem> {
        let named = devices::parse(&flags.device)?;
        let drives: Vec<PciAddress> = named.iter().filter_map(|named| named.address()).collect();
        if !drives.is_empty() && drives.len() < named.len() {
            return Err(devices::mixed());
        }
        Ok(Self {
            drives,
            gpu: gpu::choice(&flags.gpu)?,
            require: flags.require.map(required),
            json: flags.json,
        })
    }
}

impl ReplayArgs {
    /// A small replay with one software controller, in which every byte is checked.
    pub(crate) fn trial(executor: Executor, route: Route) -> Self {
        let model = &MODELS[0];
        let shape = Shape {
            model: model.name,
            layers: model.layers,
            segments: model.segments,
            block_tokens: model.block_tokens,
            object_bytes: model.token_bytes * model.block_tokens,
        };
        Self {
            trace: None,
            requests: Some(TRIAL_REQUESTS),
            seed: 1,
            shape,
            pool_blocks: Some(TRIAL_BLOCKS),
            verify: Verify::Full,
            devices: Devices::Emu(EmuChoice::one(model.lba_bytes)),
            memory: MemoryChoice::Host,
            overwrite: false,
            capacity: None,
            queues: 1,
            depth: 64,
            executor,
            require: Some(route),
            coalesce: 128 << 10,
            descriptors: Descriptors::Auto,
            json: true,
            progress: false,
            quiet: true,
        }
    }

    /// Checks everything that can be checked without the workload.
    ///
    /// # Errors
    /// The first flag that makes no sense, or none together with another.
    pub(crate) fn check(flags: &ReplayFlags) -> Result<Self, Problem> {
        let model = model(&flags.model)?;
        let shape = Shape::new(model, flags.block_tokens.unwrap_or(model.block_tokens))?;
        let descriptors = match flags.descriptors {
            DescriptorsFlag::Auto => Descriptors::Auto,
            DescriptorsFlag::Sgl => Descriptors::Sgl,
            DescriptorsFlag::Prp => Descriptors::Prp,
        };
        let devices = Devices::check(flags, model.lba_bytes)?;
        let args = Self {
            trace: flags.trace.clone(),
            requests: flags.requests,
            seed: flags.seed,
            shape,
            pool_blocks: flags.pool_blocks,
            verify: match flags.verify {
                VerifyFlag::Full => Verify::Full,
                VerifyFlag::Sampled => Verify::Sampled,
                VerifyFlag::Off => Verify::Off,
            },
            memory: MemoryChoice::check(&flags.memory, &devices)?,
            devices,
            overwrite: flags.overwrite,
            capacity: flags.capacity,
            queues: flags.queues,
            depth: flags.depth,
            executor: Executor::check(flags)?,
            require: flags.require.map(required),
            coalesce: coalesce(&flags.coalesce, shape.object_bytes)?,
            descriptors,
            json: flags.json,
            progress: flags.progress == ProgressFlag::Auto && !flags.json && !flags.quiet,
            quiet: flags.quiet,
        };
        args.check_counts()?;
        if let Devices::Emu(emu) = &args.devices {
            args.check_prp(emu.lba_bytes)?;
        }
        Ok(args)
    }

    fn check_counts(&self) -> Result<(), Problem> {
        if self.requests == Some(0) {
            return Err(Problem::new(
                "--requests 0: there would be nothing to replay",
                "ask for at least one request, or leave it out",
            ));
        }
        if self.pool_blocks == Some(0) {
            return Err(Problem::new(
                "--pool-blocks 0: a request needs at least one block to be retrieved into",
                "ask for at least one block, or leave it out",
            ));
        }
        if !(1..=EMU_QUEUES).contains(&self.queues) {
            return Err(Problem::new(
                format!(
                    "--queues {}: expected 1 to {EMU_QUEUES}, the queue pairs that a software \
                     controller offers",
                    self.queues
                ),
                "queues are counted for each device; more devices have more of them",
            ));
        }
        if !self.depth.is_power_of_two() || !(2..=EMU_DEPTH).contains(&self.depth) {
            return Err(Problem::new(
                format!(
                    "--depth {}: expected a power of two from 2 to {EMU_DEPTH}, the entries that \
                     a queue of a software controller may have",
                    self.depth
                ),
                "256 keeps a device busy; more of it needs more memory for descriptors",
            ));
        }
        Ok(())
    }

    /// PRPs name whole pages: there is no place for the bytes between an object and its slot's end.
    ///
    /// # Errors
    /// When that would be needed on devices with LBAs of `lba_bytes`.
    pub(crate) fn check_prp(&self, lba_bytes: u32) -> Result<(), Problem> {
        let object = self.shape.object_bytes;
        if self.descriptors == Descriptors::Prp && !object.is_multiple_of(lba_bytes) {
            return Err(Problem::new(
                format!(
                    "--descriptors prp: an object has {object} bytes, which is not a multiple of \
                     the LBA size of {lba_bytes} bytes, and PRPs cannot pad"
                ),
                "use --descriptors auto or sgl, a smaller --lba, or more --block-tokens",
            ));
        }
        Ok(())
    }
}

fn model(name: &str) -> Result<&'static Model, Problem> {
    MODELS.iter().find(|model| model.name == name).ok_or_else(|| {
        let names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
        Problem::new(
            format!("--model {name}: no such model"),
            format!("choose one of {}", names.join(", ")),
        )
    })
}

fn coalesce(text: &str, object_bytes: u32) -> Result<u32, Problem> {
    let wrong = |why: String| {
        Problem::new(format!("--coalesce {text}: {why}"), "use a size such as 256KiB, or off")
    };
    if text == "off" {
        return Ok(object_bytes);
    }
    let bytes = crate::size::parse(text).map_err(wrong)?;
    if bytes == 0 {
        return Err(wrong("a command cannot move less than one object".to_owned()));
    }
    Ok(u32::try_from(bytes).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::raw::{Command, Raw};

    fn check(line: &str) -> Result<ReplayArgs, Problem> {
        let words = ["ripieno", "replay"].into_iter().chain(line.split_whitespace());
        let Command::Replay(flags) = Raw::try_parse_from(words).unwrap().command else {
            panic!("replay was asked for")
        };
        ReplayArgs::check(&flags)
    }

    #[test]
    fn defaults_follow_the_model() {
        let args = check("").unwrap();
        assert_eq!((args.shape.object_bytes, args.coalesce), (1024, 128 << 10));
        assert_eq!(args.verify, Verify::Sampled);
        let args = check("--model deepseek-v3-mla --coalesce off").unwrap();
        assert_eq!(args.shape.block_tokens, 64);
        assert_eq!(args.coalesce, 72 << 10);
        assert_eq!(check("--coalesce 1MiB").unwrap().coalesce, 1 << 20);
        assert!(!check("--json").unwrap().progress && !check("-q").unwrap().progress);
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for (line, wanted) in [
            ("--model gpt-9", "no such model"),
            ("--block-tokens 48", "cannot be cut"),
            ("--block-tokens 1", "not a multiple of 4"),
            ("--queues 0", "expected 1 to 64"),
            ("--queues 65", "offers"),
            ("--depth 100", "power of two"),
            ("--depth 2048", "2 to 1024"),
            ("--coalesce lots", "whole number"),
            ("--coalesce 0", "less than one object"),
            ("--requests 0", "nothing to replay"),
            ("--pool-blocks 0", "at least one block"),
            ("--descriptors prp --lba 4096", "cannot pad"),
        ] {
            let problem = check(line).unwrap_err();
            assert!(problem.to_string().contains(wanted), "{line}: {problem}");
            let flag = line.split_whitespace().next().unwrap();
            assert!(problem.to_string().contains(flag), "{line}: {problem}");
            assert!(!problem.hint().is_empty(), "{line}");
        }
    }
}
