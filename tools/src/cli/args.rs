//! The flags once they are checked: what is in here can be built.

use std::path::{Path, PathBuf};

use crate::model::{MODELS, Model, Shape};
use crate::problem::Problem;
use crate::size::Size;

use super::raw::{DescriptorsFlag, ProgressFlag, ReplayFlags, VerifyFlag};

/// Devices a store may have; also the most the layout is tested with.
const DEVICES_MAX: u32 = 64;
/// Queue pairs one software controller offers.
pub(crate) const EMU_QUEUES: u16 = 64;
/// Entries a queue of a software controller may have (MQES).
pub(crate) const EMU_DEPTH: u32 = 1024;
/// The smallest MDTS there is: 2^1 pages, because 2^0 stands for "no limit".
const MDTS_MIN: u64 = 8 << 10;
/// The largest MDTS that is offered: far more than any drive's.
const MDTS_MAX: u64 = 64 << 20;

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

/// Where the software controllers keep their bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MediaChoice {
    /// In memory of this process.
    Memory,
    /// In nameless files in this directory.
    File(PathBuf),
}

/// Who runs the I/O kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Executor {
    /// Threads of their own.
    Host,
    /// The thread that waits.
    Inline,
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
    /// Number of devices.
    pub(crate) devices: u32,
    /// Behind the controllers.
    pub(crate) media: MediaChoice,
    /// Bytes for objects over all devices, if chosen.
    pub(crate) capacity: Option<u64>,
    /// Bytes of an LBA.
    pub(crate) lba_bytes: u32,
    /// Bytes of the largest transfer.
    pub(crate) mdts: u32,
    /// Queue pairs of each device.
    pub(crate) queues: u16,
    /// Entries of each queue.
    pub(crate) depth: u32,
    /// Who runs the I/O kernel.
    pub(crate) executor: Executor,
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

impl ReplayArgs {
    /// Checks everything that can be checked without the workload.
    ///
    /// # Errors
    /// The first flag that makes no sense, or none together with another.
    pub(crate) fn check(flags: &ReplayFlags) -> Result<Self, Problem> {
        device(&flags.device)?;
        let model = model(&flags.model)?;
        let shape = Shape::new(model, flags.block_tokens.unwrap_or(model.block_tokens))?;
        let descriptors = match flags.descriptors {
            DescriptorsFlag::Auto => Descriptors::Auto,
            DescriptorsFlag::Sgl => Descriptors::Sgl,
            DescriptorsFlag::Prp => Descriptors::Prp,
        };
        let lba_bytes = lba(flags.lba.unwrap_or(u64::from(model.lba_bytes)))?;
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
            devices: flags.devices,
            media: media(&flags.media)?,
            capacity: flags.capacity,
            lba_bytes,
            mdts: mdts(flags.mdts)?,
            queues: flags.queues,
            depth: flags.depth,
            executor: executor(&flags.executor)?,
            coalesce: coalesce(&flags.coalesce, shape.object_bytes)?,
            descriptors,
            json: flags.json,
            progress: flags.progress == ProgressFlag::Auto && !flags.json && !flags.quiet,
            quiet: flags.quiet,
        };
        args.check_counts()?;
        args.check_prp()?;
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
        if !(1..=DEVICES_MAX).contains(&self.devices) {
            return Err(Problem::new(
                format!("--devices {}: expected 1 to {DEVICES_MAX}", self.devices),
                "one to four devices show all there is to see on a small machine",
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
    fn check_prp(&self) -> Result<(), Problem> {
        let object = self.shape.object_bytes;
        if self.descriptors == Descriptors::Prp && !object.is_multiple_of(self.lba_bytes) {
            return Err(Problem::new(
                format!(
                    "--descriptors prp: an object has {object} bytes, which is not a multiple of \
                     the LBA size of {} bytes, and PRPs cannot pad",
                    self.lba_bytes
                ),
                "use --descriptors auto or sgl, a smaller --lba, or more --block-tokens",
            ));
        }
        Ok(())
    }
}

fn device(text: &str) -> Result<(), Problem> {
    if text == "emu" {
        return Ok(());
    }
    if text == "vfio" || text.starts_with("vfio:") {
        return Err(Problem::new(
            format!("--device {text}: real drives are not built in yet; they come with VFIO"),
            "use --device emu: software controllers, with --media file:DIR on a real drive's \
             file system if you like",
        ));
    }
    Err(Problem::new(format!("--device {text}: no such kind of device"), "use --device emu"))
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

fn media(text: &str) -> Result<MediaChoice, Problem> {
    if text == "memory" {
        return Ok(MediaChoice::Memory);
    }
    let Some(directory) = text.strip_prefix("file:") else {
        return Err(Problem::new(
            format!("--media {text}: no such kind of media"),
            "use --media memory, or --media file:DIR for files in a directory",
        ));
    };
    let path = Path::new(directory);
    let found = match path.metadata() {
        Ok(meta) if meta.is_dir() => return Ok(MediaChoice::File(path.to_owned())),
        Ok(_) => "is not a directory".to_owned(),
        Err(error) => format!("cannot be used: {error}"),
    };
    Err(Problem::new(
        format!("--media {text}: the directory {directory:?} {found}"),
        "name a directory that exists and that you may write to, such as --media file:/var/tmp",
    ))
}

fn executor(text: &str) -> Result<Executor, Problem> {
    match text {
        "host" => Ok(Executor::Host),
        "inline" => Ok(Executor::Inline),
        "cuda" => Err(Problem::new(
            "--executor cuda: the GPU's executor is not built in yet",
            "use --executor host: the same I/O kernel, compiled for the host and run by threads",
        )),
        _ => Err(Problem::new(
            format!("--executor {text}: no such executor"),
            "use --executor host or --executor inline",
        )),
    }
}

fn lba(bytes: u64) -> Result<u32, Problem> {
    match bytes {
        512 => Ok(512),
        4096 => Ok(4096),
        _ => Err(Problem::new(
            format!("--lba {bytes}: the software controller formats LBAs of 512 or 4096 bytes"),
            "use --lba 512 or --lba 4096",
        )),
    }
}

fn mdts(bytes: u64) -> Result<u32, Problem> {
    if bytes.is_power_of_two() && (MDTS_MIN..=MDTS_MAX).contains(&bytes) {
        return Ok(bytes as u32);
    }
    Err(Problem::new(
        format!(
            "--mdts {bytes}: expected a power of two from {} to {}",
            Size(MDTS_MIN),
            Size(MDTS_MAX)
        ),
        "drives report 128KiB to 2MiB",
    ))
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
        let Command::Replay(flags) = Raw::try_parse_from(words).unwrap().command;
        ReplayArgs::check(&flags)
    }

    #[test]
    fn defaults_follow_the_model() {
        let args = check("").unwrap();
        assert_eq!((args.shape.object_bytes, args.lba_bytes, args.devices), (1024, 512, 2));
        assert_eq!((args.coalesce, args.mdts), (128 << 10, 512 << 10));
        assert_eq!(args.verify, Verify::Sampled);
        let args = check("--model deepseek-v3-mla --coalesce off").unwrap();
        assert_eq!((args.shape.block_tokens, args.lba_bytes), (64, 4096));
        assert_eq!(args.coalesce, 72 << 10);
        assert_eq!(check("--coalesce 1MiB").unwrap().coalesce, 1 << 20);
        assert!(!check("--json").unwrap().progress && !check("-q").unwrap().progress);
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_way_out() {
        for (line, wanted) in [
            ("--device vfio:0000:65:00.0", "not built in yet"),
            ("--device tape", "no such kind of device"),
            ("--executor cuda", "not built in yet"),
            ("--executor mpi", "no such executor"),
            ("--model gpt-9", "no such model"),
            ("--block-tokens 48", "cannot be cut"),
            ("--block-tokens 1", "not a multiple of 4"),
            ("--devices 0", "expected 1 to 64"),
            ("--devices 65", "expected 1 to 64"),
            ("--queues 0", "expected 1 to 64"),
            ("--queues 65", "offers"),
            ("--depth 100", "power of two"),
            ("--depth 2048", "2 to 1024"),
            ("--lba 520", "512 or 4096"),
            ("--mdts 5000", "a power of two from 8 KiB"),
            ("--mdts 4KiB", "a power of two from 8 KiB"),
            ("--coalesce lots", "whole number"),
            ("--coalesce 0", "less than one object"),
            ("--requests 0", "nothing to replay"),
            ("--pool-blocks 0", "at least one block"),
            ("--media tape", "no such kind of media"),
            ("--media file:/no/such/place", "No such file"),
            ("--media file:/dev/null", "is not a directory"),
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
