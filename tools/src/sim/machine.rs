//! The simulated machine.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kv_schedule::SlackTable;
use ripieno_sim::{Gpu, LLAMA_3_8B, Machine, Model, Parameters, Request};

use super::workload::{above_zero, seconds};
use crate::file::read_text;
use crate::layer_times::{TABLE_BYTES_MAX, TableFile};
use crate::problem::Problem;
use crate::size::{self, Size};
use crate::timing::engine_layers;

/// Flags of the machine and the prices.
#[derive(Debug, Args)]
pub(crate) struct MachineFlags {
    /// Model
    #[arg(long, value_name = "NAME", default_value = LLAMA_3_8B.name, value_parser = model(),
        help_heading = "Machine")]
    model: Model,

    /// GPU
    #[arg(long, value_name = "NAME", default_value = Gpu::NAMES[0], value_parser = gpu(),
        ignore_case = true,
        help_heading = "Machine")]
    gpu: &'static str,

    /// Measured layer times of an engine, instead of the GPU's computed ones: a slack table or a
    /// file of layer times (see `ripieno bench table`), of any model and GPU
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    layers: Option<PathBuf>,

    /// GPUs that share the model's tensors; host memory and drives are shared by all of them
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Machine",
        value_parser = size::count::<u32>(1..=64))]
    gpus: u32,

    /// Memory of all GPUs for KV cache [default: 90 % of it, minus the weights of the layers]
    #[arg(long, value_name = "SIZE", value_parser = size::memory, help_heading = "Machine")]
    kv_memory: Option<u64>,

    #[command(flatten)]
    drive: DriveFlags,

    /// Initial table of the scheduler, which may be wrong: drives and GPU stay as they are
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    scheduler_table: Option<PathBuf>,

    /// Parameters to replace, each with its source; `ripieno sim parameters` prints all of them
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    parameters: Option<PathBuf>,

    /// Dollars an hour per GPU [default: 5; all prices are the Tutti paper's, section 4.3]
    #[arg(long, value_name = "DOLLARS", value_parser = above_zero, help_heading = "Prices")]
    gpu_price: Option<f64>,

    /// Dollars an hour per 10^9 bytes of host memory [default: 0.0088]
    #[arg(long, value_name = "DOLLARS", value_parser = above_zero, help_heading = "Prices")]
    dram_price: Option<f64>,

    /// Dollars an hour per 10^9 bytes of drives [default: 0.000082]
    #[arg(long, value_name = "DOLLARS", value_parser = above_zero, help_heading = "Prices")]
    drive_price: Option<f64>,
}

/// Flags of a drive.
#[derive(Debug, Args)]
struct DriveFlags {
    /// Capacity of a drive [default: 7TB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Drives")]
    drive_size: Option<u64>,

    /// Bytes a second that a drive reads [default: 12.95GB, half of the Tutti paper's two]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Drives")]
    drive_read: Option<u64>,

    /// Bytes a second that a drive writes [default: 4.9GB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Drives")]
    drive_write: Option<u64>,

    /// Part of the bandwidth that both directions together have while a drive reads and writes, up
    /// to 2 for all of both [default: 0.4]
    #[arg(long, value_name = "PART", value_parser = above_zero, help_heading = "Drives")]
    mixed: Option<f64>,

    /// Time between the request and the first byte of a drive: 80us, or microseconds [default: 80]
    #[arg(long, value_name = "TIME", value_parser = micros, help_heading = "Drives")]
    latency: Option<f64>,

    /// Operations a second of a drive [default: 1000000]
    #[arg(long, value_name = "COUNT", value_parser = above_zero, help_heading = "Drives")]
    iops: Option<f64>,

    /// Measured costs of drives: a slack table of `ripieno bench table`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["drive_read", "drive_write", "mixed",
        "latency"], help_heading = "Drives")]
    table: Option<PathBuf>,
}

/// Parses microseconds, or a time with a unit.
fn micros(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(_) => above_zero(text),
        Err(_) => seconds(text).map(|seconds| seconds * 1e6),
    }
}

fn model() -> impl TypedValueParser<Value = Model> {
    let names = Model::ALL.iter().map(|model| model.name);
    PossibleValuesParser::new(names).map(|name| {
        let mut all = Model::ALL.iter();
        *all.find(|model| model.name == name).expect("a name of the list")
    })
}

fn gpu() -> impl TypedValueParser<Value = &'static str> {
    PossibleValuesParser::new(Gpu::NAMES).map(|name| {
        let mut all = Gpu::NAMES.into_iter();
        all.find(|known| known.eq_ignore_ascii_case(&name)).expect("a name of the list")
    })
}

/// Reads a slack table of any setting.
fn slack_table(flag: &'static str, path: &Path) -> Result<SlackTable, Problem> {
    TableFile(flag, path, "name a file of `ripieno bench table --out`").read()
}

/// Files and parameters of the machine.
#[derive(Debug)]
pub(crate) struct MachineFiles {
    layers: Option<SlackTable>,
    known: Option<SlackTable>,
    pub(crate) parameters: Parameters,
}

impl MachineFlags {
    /// Returns the contents of the named files, and the parameters with what flags replace.
    pub(crate) fn files(&self) -> Result<MachineFiles, Problem> {
        let known = self.scheduler_table.as_deref();
        Ok(MachineFiles {
            layers: self.layers.as_deref().map(engine_layers).transpose()?,
            known: known.map(|path| slack_table("--scheduler-table", path)).transpose()?,
            parameters: self.parameters()?,
        })
    }

    fn parameters(&self) -> Result<Parameters, Problem> {
        let mut parameters = Parameters::default();
        if let Some(path) = &self.parameters {
            let wrong = |error: String| {
                let what = format!("--parameters {}: {error}", path.display());
                Problem::new(what, "`ripieno sim parameters` prints a file to begin with")
            };
            let text = read_text(path, TABLE_BYTES_MAX).map_err(|it| wrong(it.to_string()))?;
            parameters.replace(&text).map_err(wrong)?;
        }
        let wrong = |flag: &str, error: String| {
            Problem::new(format!("{flag}: {error}"), "measure with `ripieno bench table`")
        };
        let DriveFlags { drive_size, drive_read, drive_write, mixed, latency, iops, table } =
            &self.drive;
        if let Some(path) = table {
            let table = slack_table("--table", path)?;
            let (count, source) = (table.setting().drives.len(), path.display().to_string());
            if count == 0 {
                let what = format!("--table {source}: it has layer times and no drives");
                return Err(Problem::new(what, "measure drives with `ripieno bench table`"));
            }
            let set = parameters.set_costs(&table.costs, count, &source);
            set.map_err(|error| wrong("--table", error))?;
        }
        let bytes = |flag: Option<u64>| flag.map(|bytes| bytes as f64);
        for (flag, name, value) in [
            ("--drive-read", "drive.read", bytes(*drive_read)),
            ("--drive-write", "drive.write", bytes(*drive_write)),
            ("--mixed", "drive.mixed", *mixed),
            ("--latency", "drive.latency", *latency),
            ("--iops", "drive.iops", *iops),
            ("--drive-size", "drive.bytes", bytes(*drive_size)),
            ("--gpu-price", "price.gpu", self.gpu_price),
            ("--dram-price", "price.dram", self.dram_price),
            ("--drive-price", "price.drive", self.drive_price),
        ] {
            if let Some(value) = value {
                parameters.set(name, value, flag).map_err(|error| wrong(flag, error))?;
            }
        }
        Ok(parameters)
    }

    /// Returns the machine, with `dram` bytes of host memory and [`Self::files`].
    pub(crate) fn machine<'a>(
        &self,
        dram: Option<u64>,
        drives: u32,
        files: &'a MachineFiles,
    ) -> Result<Machine<'a>, Problem> {
        let MachineFiles { layers, known, parameters } = files;
        let gpu = Gpu { count: self.gpus, ..parameters.gpu(self.gpu) };
        let model = self.model;
        let room = self.kv_memory.or_else(|| Machine::kv_room(&model, &gpu)).ok_or_else(|| {
            let has = Size(gpu.bytes * u64::from(gpu.count));
            let what = format!("--model {}: its weights leave no room in {has}", model.name);
            Problem::new(what, "use more GPUs (--gpus)")
        })?;
        Ok(Machine {
            parameters,
            model,
            gpu,
            layers: layers.as_ref(),
            known: known.as_ref(),
            kv_bytes: room,
            dram_bytes: dram.unwrap_or_else(|| parameters.value("host.bytes") as u64),
            drives,
            drive_bytes: parameters.value("drive.bytes") as u64,
        })
    }
}

/// Checks that each request alone fits into the GPUs' memory.
pub(crate) fn check_fit(machine: &Machine<'_>, requests: &[Request]) -> Result<(), Problem> {
    let Some(at) = machine.too_long(requests) else { return Ok(()) };
    let Request { input, output, .. } = requests[at];
    let need = u64::from(input + output) * machine.model.token_bytes();
    let [need, room] = [need, machine.kv_bytes].map(Size);
    Err(Problem::new(
        format!(
            "request {}: {input} tokens of prompt and {output} of output need {need} of KV cache, \
             and the GPU's memory has {room} for it",
            at + 1
        ),
        "use more GPUs (--gpus) or more memory (--kv-memory)",
    ))
}
