//! `bench codec`: encoding and decoding of KV objects against copies of the raw bytes, one core.

use std::hint::black_box;

use anyhow::{Context as _, Result};
use kv_codec::{Isa, encoded_len};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::{
    report::{Aim, Ratio, Report},
    sample::{Sides, gib_s, timed},
};

/// Arguments of `codec`.
#[derive(clap::Args, Debug)]
pub struct CodecArgs {
    /// Rounds of each measurement; the two sides of a ratio alternate
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Bytes of an object
    #[arg(long, default_value_t = 32 << 10)]
    object: usize,
}

/// Measures everything.
pub fn run(args: &CodecArgs) -> Result<Report> {
    let mut report = Report::new("codec");
    let encoded = encoded_len(args.object)
        .with_context(|| format!("--object {} is no multiple of 128", args.object))?;
    for (place, bytes) in [("memory", 256 << 20), ("cache", 512 << 10)] {
        let objects = (bytes / args.object).max(1);
        let mut work = Work::new(objects, args.object, encoded);
        for isa in Isa::all() {
            let mut measure = |name: &str, aim, ours: fn(&mut Work, Isa)| {
                // As many bytes in the cache as in memory.
                let times = ((256 << 20) / (objects * args.object)).max(1);
                let speed = |(), took| gib_s((times * objects * args.object) as u64, took);
                let sides = Sides::measure(args.rounds, |_| {
                    let (done, took) = timed(|| (0..times).for_each(|_| ours(&mut work, isa)));
                    let ours = speed(done, took);
                    let (done, took) = timed(|| (0..times).for_each(|_| work.copy()));
                    Ok::<_, anyhow::Error>((ours, speed(done, took)))
                })?;
                let name = format!("{name} with {isa} against memcpy, in {place}");
                report.ratios.push(Ratio::rounds(name, "GiB/s of raw bytes", &sides).aim(aim));
                Ok::<_, anyhow::Error>(())
            };
            measure("decode", Aim::AtLeast(0.5, 0.5), Work::decode)?;
            measure("encode", Aim::Open, Work::encode)?;
        }
    }
    Ok(report)
}

/// Objects, raw and encoded.
struct Work {
    raw: Vec<u8>,
    encoded: Vec<u8>,
    out: Vec<u8>,
    sizes: (usize, usize),
}

impl Work {
    fn new(objects: usize, raw: usize, encoded: usize) -> Self {
        let mut random = StdRng::seed_from_u64(1);
        // Sums of twelve uniform numbers: nearly normal, as KV is. 2 % of the exponents escape.
        let mut scalar = || {
            let normal = (0..12).map(|_| random.random::<f32>()).sum::<f32>() - 6.0;
            (normal.to_bits() >> 16) as u16
        };
        let object: Vec<u8> = (0..raw / 2).flat_map(|_| scalar().to_le_bytes()).collect();
        let mut work = Self {
            raw: object.repeat(objects),
            encoded: vec![0; objects * encoded],
            out: vec![0; objects * raw],
            sizes: (raw, encoded),
        };
        work.encode(Isa::best());
        work
    }

    fn encode(&mut self, isa: Isa) {
        let raw = self.raw.chunks_exact(self.sizes.0);
        for (raw, out) in raw.zip(self.encoded.chunks_exact_mut(self.sizes.1)) {
            isa.encode(raw, out).expect("normal numbers fit");
        }
        black_box(&mut self.encoded);
    }

    fn decode(&mut self, isa: Isa) {
        let encoded = self.encoded.chunks_exact(self.sizes.1);
        for (encoded, out) in encoded.zip(self.out.chunks_exact_mut(self.sizes.0)) {
            isa.decode(encoded, out).expect("it was encoded");
        }
        black_box(&mut self.out);
    }

    fn copy(&mut self) {
        let raw = self.raw.chunks_exact(self.sizes.0);
        for (raw, out) in raw.zip(self.out.chunks_exact_mut(self.sizes.0)) {
            out.copy_from_slice(raw);
        }
        black_box(&mut self.out);
    }
}
