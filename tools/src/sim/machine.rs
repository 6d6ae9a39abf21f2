//! The simulated machine.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kv_schedule::SlackTable;
use ripieno_sim::{Gpu, H100, LLAMA_3_8B, Machine, Model, Prices, Request};

use super::workload::above_zero;
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
    #[arg(long, value_name = "NAME", default_value = H100.name, value_parser = gpu(),
        ignore_case = true,
        help_heading = "Machine")]
    gpu: Gpu,

    /// Measured layer times of an engine, instead of the GPU's computed ones: a slack table or a
    /// file of layer times (see `ripieno bench table`), of any model and GPU
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    layers: Option<PathBuf>,

    /// GPUs that share the model's tensors; host memory and drives are shared by all of them
    #[arg(long, value_name = "COUNT", default_value_t = 1, help_heading = "Machine",
        value_parser = size::count::<u32>(1..=64))]
    gpus: u32,

    /// Memory of all GPUs for KV cache [default: 90 % of it, minus the weights of the layers]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Machine")]
    kv_memory: Option<u64>,

    /// Capacity of a drive
    #[arg(long, value_name = "SIZE", default_value = "7TB", value_parser = size::parse,
        help_heading = "Machine")]
    drive_size: u64,

    /// Dollars an hour per GPU. The default prices are the Tutti paper's (section 4.3)
    #[arg(long, value_name = "DOLLARS", default_value_t = Prices::TUTTI.gpu,
        value_parser = above_zero, help_heading = "Prices")]
    gpu_price: f64,

    /// Dollars an hour per 10^9 bytes of host memory
    #[arg(long, value_name = "DOLLARS", default_value_t = Prices::TUTTI.dram_gb,
        value_parser = above_zero, help_heading = "Prices")]
    dram_price: f64,

    /// Dollars an hour per 10^9 bytes of drives
    #[arg(long, value_name = "DOLLARS", default_value_t = Prices::TUTTI.drive_gb,
        value_parser = above_zero, help_heading = "Prices")]
    drive_price: f64,
}

fn model() -> impl TypedValueParser<Value = Model> {
    let names = Model::ALL.iter().map(|model| model.name);
    PossibleValuesParser::new(names).map(|name| {
        let mut all = Model::ALL.iter();
        *all.find(|model| model.name == name).expect("a name of the list")
    })
}

fn gpu() -> impl TypedValueParser<Value = Gpu> {
    PossibleValuesParser::new(Gpu::ALL.iter().map(|gpu| gpu.name)).map(|name| {
        let mut all = Gpu::ALL.iter();
        *all.find(|gpu| gpu.name.eq_ignore_ascii_case(&name)).expect("a name of the list")
    })
}

impl MachineFlags {
    /// Returns the layer times in the file of `--layers`.
    ///
    /// # Errors
    /// Returns a [`Problem`] if the file has none.
    pub(crate) fn layers(&self) -> Result<Option<SlackTable>, Problem> {
        self.layers.as_deref().map(engine_layers).transpose()
    }

    /// Returns the machine, with `dram` bytes of host memory and [`Self::layers`].
    ///
    /// # Errors
    /// Returns a [`Problem`] if the model does not fit.
    pub(crate) fn machine<'a>(
        &self,
        dram: u64,
        drives: u32,
        layers: Option<&'a SlackTable>,
    ) -> Result<Machine<'a>, Problem> {
        let gpu = Gpu { count: self.gpus, ..self.gpu };
        let Self { model, drive_size, .. } = *self;
        let room = self.kv_memory.or_else(|| Machine::kv_room(&model, &gpu)).ok_or_else(|| {
            let has = Size(gpu.bytes * u64::from(gpu.count));
            let what = format!("--model {}: its weights leave no room in {has}", model.name);
            Problem::new(what, "use more GPUs (--gpus)")
        })?;
        Ok(Machine {
            model,
            gpu,
            layers,
            kv_bytes: room,
            dram_bytes: dram,
            drives,
            drive_bytes: drive_size,
        })
    }

    /// Returns the prices.
    pub(crate) fn prices(&self) -> Prices {
        let Self { gpu_price, dram_price, drive_price, .. } = *self;
        Prices { gpu: gpu_price, dram_gb: dram_price, drive_gb: drive_price }
    }
}

/// Checks that each request alone fits into the GPUs' memory.
///
/// # Errors
/// Returns a [`Problem`] for the first that does not.
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
