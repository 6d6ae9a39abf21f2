#![allow(unsafe_code, reason = "launches a kernel on memory that is laid out here")]
//! Slowdown of a large bf16 matrix product by the I/O kernel running beside it.
//!
//! The I/O is the store's: a resident kernel and retrieves into the GPU's memory by the staged
//! route, as fast as the software controllers allow. So SMs, L2, HBM and the bus are all shared as
//! in an engine. The GPU's own clock times the products.

use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use gio_kernels::cuda::{CudaStream, DeviceMemory, LaunchMode};
use objstore::Route;

use super::{
    abi::{FillArgs, MATMUL_THREADS, MatmulArgs, TILE},
    device::{Gpu, Span, TIMEOUT, wait_idle},
    retrieve::Size,
};
use crate::{
    sample::{Samples, gib_s},
    stack::{Stack, scattered},
};

const SEEDS: [u64; 2] = [11, 12];
/// Entries to compare with an exact integer product.
const CHECKED: u64 = 64;

/// Three matrices on the GPU.
pub struct Matmul {
    gpu: Arc<Gpu>,
    a: DeviceMemory,
    b: DeviceMemory,
    c: DeviceMemory,
    m: u32,
    n: u32,
    k: u32,
    /// Products per sample.
    repeats: u32,
    span: Span,
}

impl Matmul {
    /// Allocates matrices for 8192 x 8192 x 8192: 1.1 TFLOP, a few ms.
    pub fn new(gpu: &Arc<Gpu>, tiny: bool) -> Result<Self> {
        let (m, n, k, repeats) = if tiny { (256, 384, 64, 2) } else { (8192, 8192, 8192, 40) };
        let matrix =
            |rows: u32, columns: u32| gpu.device.allocate(rows as usize * columns as usize * 2);
        let (a, b, c) = (matrix(m, k)?, matrix(n, k)?, matrix(m, n)?);
        let span = Span::new(gpu)?;
        let matmul = Self { gpu: gpu.clone(), a, b, c, m, n, k, repeats, span };
        matmul.fill()?;
        Ok(matmul)
    }

    fn fill(&self) -> Result<()> {
        let stream = CudaStream::lowest(&self.gpu.device)?;
        for (matrix, seed) in [&self.a, &self.b].into_iter().zip(SEEDS) {
            let args = FillArgs { at: matrix.device().0, count: matrix.len() as u64 / 2, seed };
            // SAFETY: the argument's type is that of abi.h; the wait below ends before the memory
            // is freed.
            unsafe { self.gpu.fill.launch(Gpu::raw(&stream), 1024, 256, args)? };
        }
        wait_idle(&stream, TIMEOUT)
    }

    /// Returns the milliseconds of one product on this stream.
    pub fn time(&self, stream: &CudaStream) -> Result<f64> {
        let args = MatmulArgs {
            a: self.a.device().0,
            b: self.b.device().0,
            c: self.c.device().0,
            m: self.m,
            n: self.n,
            k: self.k,
            reserved: 0,
        };
        let blocks = self.m / TILE * (self.n / TILE);
        let took = self.span.time(&self.gpu, stream, TIMEOUT, || {
            for _ in 0..self.repeats {
                // SAFETY: same as in `fill`; `time` waits.
                unsafe {
                    self.gpu.matmul.launch(Gpu::raw(stream), blocks, MATMUL_THREADS, args)?;
                }
            }
            Ok(())
        })?;
        ensure!(took > Duration::ZERO, "the GPU's clock did not move during a matrix product");
        Ok(took.as_secs_f64() * 1e3 / f64::from(self.repeats))
    }

    /// Returns the floating-point operations of one product.
    pub fn flop(&self) -> f64 {
        2.0 * f64::from(self.m) * f64::from(self.n) * f64::from(self.k)
    }

    /// Formats the dimensions.
    pub fn shape(&self) -> String {
        format!("{} x {} x {}", self.m, self.n, self.k)
    }

    /// Compares some entries of the last product with the exact results.
    pub fn check(&self) -> Result<()> {
        for index in 0..CHECKED {
            let (i, j) = (hash(index) % u64::from(self.m), hash(!index) % u64::from(self.n));
            let at = (i * u64::from(self.n) + j) as usize * 2;
            let mut found = [0; 2];
            self.c.read(at, &mut found)?;
            let row = |seed, row: u64, at: u64| element(seed, row * u64::from(self.k) + at);
            let sum: i64 = (0..u64::from(self.k))
                .map(|at| i64::from(row(SEEDS[0], i, at) * row(SEEDS[1], j, at)))
                .sum();
            let (found, wanted) = (u16::from_le_bytes(found), bf16(sum as f32));
            ensure!(
                found == wanted,
                "entry ({i}, {j}) of the product is {found:#06x} as bf16, not {wanted:#06x} ({sum})"
            );
        }
        Ok(())
    }
}

fn hash(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 20
}

/// Returns an element of a matrix. Twin of `bench_element` in `bench/ptx/matmul.cuh`.
fn element(seed: u64, at: u64) -> i32 {
    let x = seed.wrapping_add(at).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    ((x >> 40) % 31) as i32 - 15
}

/// Returns the upper half of an f32, rounded to nearest, ties to even.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

/// Division of the GPU between the I/O kernel and the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// A green context for each.
    Green,
    /// All SMs for both; the I/O kernel has the higher priority.
    Priority,
}

/// Milliseconds per product, and bandwidths in GiB/s.
#[derive(Default)]
pub struct Found {
    /// On all SMs of an otherwise idle GPU.
    pub alone: Samples,
    /// On its own SMs of an otherwise idle GPU.
    pub part: Samples,
    /// With an idle resident I/O kernel.
    pub idle: Samples,
    /// With I/O.
    pub busy: Samples,
    /// Ratio of `busy` to `alone` in each round.
    pub slowdown: Samples,
    /// Retrieve bandwidth before the product; the next field is that during it.
    pub io_alone: Samples,
    pub io_busy: Samples,
}

/// Measures one kind of sharing once, and adds it to `found`.
pub fn measure(
    matmul: &Matmul,
    (sharing, sms): (Sharing, u32),
    size: Size,
    found: &mut Found,
) -> Result<()> {
    let gpu = &matmul.gpu;
    let all = CudaStream::lowest(&gpu.device)?;
    let (own, io_sms) = match sharing {
        Sharing::Green => (CudaStream::beside(&gpu.device, sms)?, Some(sms)),
        Sharing::Priority => (CudaStream::lowest(&gpu.device)?, None),
    };
    let alone = matmul.time(&all)?;
    let part = matmul.time(&own)?;
    let mut plan = size.plan(Route::Staged, LaunchMode::Resident, io_sms);
    // Enough warps for one block on each SM.
    plan.queues_per_device = (4 * sms).div_ceil(plan.devices) as u16;
    let stack = plan.stack(gpu)?;
    let idle = matmul.time(&own)?;
    let load = Load::start(stack, size)?;
    load.settle()?;
    let start = Instant::now();
    let busy = matmul.time(&own);
    let during = (start, Instant::now());
    let (stack, log) = load.stop()?;
    stack.close()?;
    let busy = busy?;
    found.alone.push(alone);
    found.part.push(part);
    found.idle.push(idle);
    found.busy.push(busy);
    found.slowdown.push(busy / alone);
    found.io_alone.push(log.bandwidth(log.began, during.0));
    found.io_busy.push(log.bandwidth(during.0, during.1));
    Ok(())
}

/// Retrieves continuously in a thread.
struct Load {
    stop: mpsc::Sender<()>,
    ready: mpsc::Receiver<()>,
    thread: JoinHandle<Result<(Stack, Log)>>,
}

/// Completion times and sizes of retrieves.
struct Log {
    began: Instant,
    done: Vec<(Instant, u64)>,
}

impl Log {
    /// Returns the bandwidth in a span of time; each retrieve counts with the fraction of it inside
    /// the span.
    fn bandwidth(&self, from: Instant, to: Instant) -> f64 {
        let (mut bytes, mut began) = (0.0, self.began);
        for &(ended, moved) in &self.done {
            let inside = ended.min(to).saturating_duration_since(began.max(from));
            let took = (ended - began).as_secs_f64().max(1e-9);
            bytes += moved as f64 * inside.as_secs_f64() / took;
            began = ended;
        }
        gib_s(bytes as u64, (to - from).max(Duration::from_nanos(1)))
    }
}

impl Load {
    fn start(stack: Stack, size: Size) -> Result<Self> {
        let ((stop, stopped), (notify, ready)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            let blocks = scattered(size.blocks);
            // Warm-up.
            stack.retrieve(&blocks)?;
            let mut log = Log { began: Instant::now(), done: Vec::new() };
            while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
                let bytes = stack.retrieve(&blocks)?;
                log.done.push((Instant::now(), bytes));
                let _ = notify.send(()); // no receiver any more: the thread's result has the reason
            }
            Ok((stack, log))
        };
        let thread = std::thread::Builder::new().name("io".into()).spawn(work)?;
        Ok(Self { stop, ready, thread })
    }

    /// Waits for some retrieves, which also measure the undisturbed bandwidth.
    fn settle(&self) -> Result<()> {
        const RETRIEVES: u32 = 3;
        for _ in 0..RETRIEVES {
            let done = self.ready.recv_timeout(TIMEOUT);
            done.map_err(|_| anyhow!("the I/O beside the matrix product does not get on"))?;
        }
        Ok(())
    }

    fn stop(self) -> Result<(Stack, Log)> {
        drop(self.stop);
        self.thread.join().map_err(|_| anyhow!("the thread of the I/O panicked"))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_small_and_spread() {
        let all: Vec<i32> = (0..10_000).map(|at| element(11, at)).collect();
        assert_eq!((all.iter().min(), all.iter().max()), (Some(&-15), Some(&15)));
        assert!(all.iter().sum::<i32>().abs() < 3_000, "{}", all.iter().sum::<i32>());
    }

    #[test]
    fn rounding_is_to_nearest_and_to_even() {
        for (value, wanted) in [(1.0, 0x3F80), (-2.0, 0xC000), (257.0, 0x4380), (259.0, 0x4382)] {
            assert_eq!(bf16(value), wanted, "{value}");
        }
    }

    #[test]
    fn a_retrieve_counts_with_the_part_inside_the_span() {
        let began = Instant::now();
        let at = |ms: u64| began + Duration::from_millis(ms);
        let log = Log { began, done: vec![(at(100), 1 << 30), (at(300), 1 << 30)] };
        let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-6, "{found}");
        near(log.bandwidth(at(0), at(100)), 10.0);
        near(log.bandwidth(at(50), at(200)), (0.5 + 0.5) / 0.15);
        near(log.bandwidth(at(300), at(400)), 0.0);
    }
}
