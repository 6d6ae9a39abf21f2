#![allow(unsafe_code, reason = "launches kernels, and waits for a context, on a GPU of its own")]
//! Experiments with a driver and its GPU. Each case runs in its own process, which is killed and
//! reported on a timeout.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use gio_kernels::cuda::{CudaModule, CudaStream, LaunchMode};
use gio_uring::Wait;
use nvme_driver::{DevicePtr, DmaSpace as _};
use nvme_emu::EmuDomain;
use objstore::{BlockId, KvShape, Layer, Order, Route};

use super::{
    abi::{ReadArgs, StampArgs},
    device::{Gpu, TIMEOUT, set_word, wait_idle, word},
    drive::Drive,
    stack::Plan,
};
use crate::sample::Samples;

/// The experiments.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Find the SMs that kernels of the primary context run on in green contexts of 2, 4 and 8
    Partition,
    /// Find the driver calls that wait for a kernel that does not end
    Calls,
    /// Test that 24 streams of waits progress beside such a kernel, with 1, 8 and 32 connections
    Connections,
    /// Test that 300 layers that wait for an event all complete without polls of the store
    Layers,
    /// Measure reads of host memory by many warps: of one line, and of a line each
    Lines,
}

/// Arguments of `experiment`.
#[derive(clap::Args, Debug)]
pub struct ExperimentArgs {
    #[arg(value_enum)]
    question: Question,
    /// Timeout of a case in seconds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// Run time of the kernel that calls may wait for, in seconds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60))]
    kernel: u64,
    /// Run only this case, in this process
    #[arg(long, hide = true)]
    case: Option<String>,
}

/// Number of streams of [`Question::Connections`].
const STREAMS: usize = 24;
/// Layers of [`Question::Layers`]: more than the launches that a stream can hold.
const LAYERS: u32 = 300;
/// Warps of [`Question::Lines`].
const READERS: [u32; 4] = [1, 4, 16, 64];
/// Cases of [`Question::Lines`], and the bytes between two warps' words.
const LINES: [(&str, u32); 2] = [("warps, one line", 0), ("warps, a line each", 512)];
/// Poll interval for the end of a process.
const POLL: Duration = Duration::from_millis(20);
/// Calls of [`Question::Calls`].
const CALLS: [&str; 8] = [
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuModuleLoadDataEx",
    "cuStreamCreate",
    "launch with a large frame",
    "cuCtxSynchronize",
];

/// A kernel with 8 KiB of stack per thread, for which a launch may have to allocate memory.
const FRAME_PTX: &str = "//
.version 8.0
.target sm_90
.address_size 64

.visible .entry bench_frame(
	.param .align 8 .b8 bench_frame_param_0[8]
)
.maxntid 32, 1, 1
{
	.local .align 16 .b8 frame[8192];
	.reg .u32 %i<4>;
	.reg .u64 %a<6>;
	ld.param.u64 %a1, [bench_frame_param_0];
	mov.u32 %i1, %tid.x;
	mul.wide.u32 %a2, %i1, 252;
	mov.u64 %a3, frame;
	add.u64 %a4, %a3, %a2;
	st.local.u32 [%a4], %i1;
	mov.u32 %i2, %laneid;
	mul.wide.u32 %a2, %i2, 252;
	add.u64 %a5, %a3, %a2;
	ld.local.u32 %i3, [%a5];
	st.u32 [%a1], %i3;
	ret;
}
";

/// Runs one experiment case by case, and prints each result.
///
/// # Errors
/// Returns an error if a case failed. A timeout is a result.
pub fn run(ordinal: u32, args: &ExperimentArgs) -> Result<()> {
    if let Some(case) = &args.case {
        return say(&one(ordinal, args, case)?);
    }
    let cases: Vec<String> = match args.question {
        Question::Partition => ["2", "4", "8"].map(String::from).into(),
        Question::Calls => CALLS.map(String::from).into(),
        Question::Connections => ["1", "8", "32"].map(String::from).into(),
        Question::Layers => vec![LAYERS.to_string()],
        Question::Lines => {
            LINES.iter().flat_map(|(how, _)| READERS.map(|n| format!("{n} {how}"))).collect()
        }
    };
    let mut failed = 0;
    for case in &cases {
        failed += u32::from(!child(ordinal, args, case)?);
    }
    ensure!(failed == 0, "{failed} of {} cases failed", cases.len());
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the result is what the program prints")]
fn say(line: &str) -> Result<()> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

/// Runs one case in its own process. Returns true if it succeeded or was killed on a timeout.
fn child(ordinal: u32, args: &ExperimentArgs, case: &str) -> Result<bool> {
    let question = clap::ValueEnum::to_possible_value(&args.question).context("it has a name")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["gpu", "--gpu", &ordinal.to_string(), "experiment", question.get_name()]);
    command.args(["--kernel", &args.kernel.to_string(), "--timeout", &args.timeout.to_string()]);
    command.args(["--case", case]).stdin(Stdio::null());
    if args.question == Question::Connections {
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", case);
    }
    let (start, limit) = (Instant::now(), Duration::from_secs(args.timeout));
    let mut process = command.spawn()?;
    loop {
        if let Some(status) = process.try_wait()? {
            if !status.success() {
                say(&format!("{case}: FAILED ({status})"))?;
            }
            return Ok(status.success());
        }
        if start.elapsed() > limit {
            process.kill()?;
            process.wait()?;
            say(&format!("{case}: did not end within {} s", args.timeout))?;
            return Ok(true);
        }
        std::thread::sleep(POLL);
    }
}

/// Runs one case and returns its result.
fn one(ordinal: u32, args: &ExperimentArgs, case: &str) -> Result<String> {
    let gpu = Arc::new(Gpu::open(ordinal)?);
    let kernel = Duration::from_secs(args.kernel);
    let answer = match args.question {
        Question::Partition => partition(&gpu, case.parse()?),
        Question::Calls => call(&gpu, case, kernel),
        Question::Connections => connections(&gpu, kernel),
        Question::Layers => layers(&gpu, case.parse()?, Duration::from_secs(args.timeout)),
        Question::Lines => lines(&gpu, case),
    }?;
    let mock = if gpu.is_mock() { "; MOCK: says nothing about a GPU" } else { "" };
    Ok(format!("{case}: {answer}{mock}"))
}

fn partition(gpu: &Gpu, sms: u32) -> Result<String> {
    let stream = CudaStream::new(&gpu.device, Some(sms))?;
    let seen = gpu.sms_of(&stream)?;
    let (first, last) = (seen.first().copied(), seen.last().copied());
    let (report, count) = (stream.report(), seen.len());
    Ok(format!("{report}; kernels ran on {count} SMs, {first:?} to {last:?}"))
}

/// A long-running kernel, like a resident I/O kernel.
struct Resident {
    drive: Drive,
}

impl Resident {
    fn start(gpu: &Arc<Gpu>, kernel: Duration) -> Result<Self> {
        let mut drive = Drive::new(gpu, 1, Some(2))?;
        drive.start(kernel)?;
        // Ensures that it runs, instead of only being enqueued.
        std::thread::sleep(Duration::from_millis(100));
        ensure!(!drive.stream.is_idle()?, "the kernel has ended already");
        Ok(Self { drive })
    }

    /// Returns the time since `start`, and whether the kernel is still running.
    fn answer(&self, start: Instant) -> Result<String> {
        let took = start.elapsed().as_secs_f64() * 1e3;
        let waited = self.drive.stream.is_idle()?;
        let verdict = if waited { "WAITED for the kernel" } else { "did not wait for the kernel" };
        Ok(format!("{verdict}, {took:.2} ms"))
    }
}

fn call(gpu: &Arc<Gpu>, call: &str, kernel: Duration) -> Result<String> {
    const BYTES: usize = 64 << 20;
    let device = &gpu.device;
    // Inputs of a call are created before the kernel starts.
    let memory = device.allocate(BYTES)?;
    let page = device.pinned(4096)?;
    let pages = EmuDomain::new("experiment").alloc(4 << 20)?;
    let frame = CudaModule::compile(device, FRAME_PTX, "a kernel with a large frame")?;
    let frame = frame.function("bench_frame")?;
    let resident = Resident::start(gpu, kernel)?;
    let start = Instant::now();
    match call {
        "cuMemAlloc" => std::mem::forget(device.allocate(BYTES)?),
        "cuMemFree" => drop(memory),
        "cuMemHostAlloc" => std::mem::forget(device.pinned(BYTES)?),
        "cuMemHostRegister" => {
            std::mem::forget(device.register_memory(&pages)?);
        }
        "cuModuleLoadDataEx" => {
            let module = CudaModule::compile(device, FRAME_PTX, "the same once more")?;
            std::mem::forget(module);
        }
        "cuStreamCreate" => std::mem::forget(CudaStream::lowest(device)?),
        "launch with a large frame" => {
            let stream = CudaStream::lowest(device)?;
            let args = StampArgs { at: page.device().0 };
            // SAFETY: the kernel takes one address; the page lives until the stream is idle.
            unsafe { frame.launch(Gpu::raw(&stream), 1, 32, args)? };
            wait_idle(&stream, kernel * 2)?;
        }
        "cuCtxSynchronize" => gpu.synchronize()?,
        _ => bail!("no such call"),
    }
    resident.answer(start)
}

/// Passes a word through all streams, each of which waits for the previous one.
fn connections(gpu: &Arc<Gpu>, kernel: Duration) -> Result<String> {
    let device = &gpu.device;
    let page = device.pinned(4096)?;
    let streams: Vec<CudaStream> =
        (0..STREAMS).map(|_| CudaStream::lowest(device)).collect::<Result<_, _>>()?;
    let resident = Resident::start(gpu, kernel)?;
    let at = |index: usize| DevicePtr(page.device().0 + index as u64 * 4);
    // The last stream first: a wait is always enqueued before its signal.
    for (index, stream) in streams.iter().enumerate().rev() {
        // SAFETY: streams of this device; the page lives until all of them are idle.
        unsafe {
            device.stream_wait(stream.raw(), at(index), 1, false)?;
            device.stream_write(stream.raw(), at(index + 1), 1)?;
        }
    }
    let start = Instant::now();
    set_word(&page, 0, 1);
    let limit = kernel * 2;
    while word(&page, STREAMS * 4) == 0 && start.elapsed() < limit {
        std::hint::spin_loop();
    }
    let passed = (0..=STREAMS).filter(|index| word(&page, index * 4) != 0).count() - 1;
    let answer = resident.answer(start)?;
    // Streams that wait behind others in a hardware queue would wait forever.
    (0..STREAMS).for_each(|index| set_word(&page, index * 4, 1));
    wait_idle(&streams[STREAMS - 1], limit)?;
    if passed < STREAMS {
        return Ok(format!("only {passed} of {STREAMS} streams passed the word on: BLOCKED"));
    }
    Ok(format!("{STREAMS} streams: {answer}"))
}

/// Acts as an engine that issues layers ahead, joins them, and waits only for its stream.
fn layers(gpu: &Arc<Gpu>, layers: u32, limit: Duration) -> Result<String> {
    let shape = KvShape { layers, segments: 1, object_bytes: 512, block_tokens: 16 };
    let engine = CudaStream::lowest(&gpu.device)?;
    let plan = Plan {
        route: Route::Host,
        mode: LaunchMode::PerBatch,
        sms: Some(2),
        devices: 1,
        queues_per_device: 1,
        shape,
        blocks: 4,
        buffers: 1,
    };
    let stack = plan.stack(gpu)?;
    let ids: Vec<BlockId> = (0..4).map(BlockId).collect();
    let prefix = stack.store.lookup(&stack.keys)?;
    let load = stack.store.retrieve(&prefix, &ids)?;
    let event = stack.store.plane().event()?;
    let mut tickets = Vec::new();
    for layer in 0..layers {
        let wait = Wait { event: event.clone(), value: layer + 1 };
        let order = Order::AfterEvent(&wait);
        let ticket = stack.store.retrieve_layer_on(&load, Layer(layer), order)?;
        stack.store.join(&ticket, Gpu::raw(&engine))?;
        tickets.push(ticket);
    }
    let start = Instant::now();
    // One by one, so that each layer finds the next one still waiting.
    for value in 1..=layers {
        event.set(value);
        std::thread::sleep(Duration::from_micros(200));
    }
    if wait_idle(&engine, limit / 2).is_err() {
        // Nothing can be freed or closed any more.
        say(&format!("{layers}: the stream does not get on: layers are not done"))?;
        std::process::exit(1);
    }
    let took = start.elapsed().as_secs_f64() * 1e3;
    for ticket in tickets {
        stack.store.wait(ticket)?;
    }
    stack.close()?;
    Ok(format!("all layers done, without a poll, {took:.1} ms after the first event"))
}

/// Times the reads of warps, each on an SM of its own.
fn lines(gpu: &Gpu, case: &str) -> Result<String> {
    const TURNS: u32 = 1000;
    let (warps, how) = case.split_once(' ').context("a number of warps")?;
    let warps: u32 = warps.parse()?;
    let line = LINES.iter().find(|(name, _)| *name == how);
    let (_, stride) = *line.context("no such case")?;
    let words = gpu.device.pinned(warps as usize * stride.max(8) as usize)?;
    let out = gpu.device.pinned(warps as usize * 4)?;
    let args = ReadArgs {
        base: words.device().0,
        out: out.device().0,
        stride,
        turns: TURNS,
        warps,
        reserved: 0,
    };
    let stream = CudaStream::lowest(&gpu.device)?;
    // SAFETY: the argument's type is that of abi.h; the memory lives until the stream is idle.
    unsafe { gpu.read.launch(Gpu::raw(&stream), warps, 32, args)? };
    wait_idle(&stream, TIMEOUT)?;
    let mut clocks = Samples::default();
    (0..warps as usize).for_each(|warp| clocks.push(f64::from(word(&out, warp * 4))));
    ensure!(clocks.median() > 0.0, "a read took no time: were there any?");
    Ok(format!("{:.0} clocks a read", clocks.median()))
}
