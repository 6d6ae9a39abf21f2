//! Parameters of the simulated hardware, each with its source: `parameters.json`, and what a user
//! replaces.

use std::{collections::BTreeMap, time::Duration};

use kv_schedule::IoCosts;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    gpu::Gpu,
    lane::LaneModel,
    outcome::{size, time},
    storage::Storage,
    summary::Prices,
};

/// Origin of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Origin {
    /// A paper or a data sheet states it.
    Input,
    /// It was set so that one of a paper's results comes out.
    Calibrated,
    /// No paper states it.
    Assumed,
    /// A user measured it.
    Measured,
}

/// A value.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct Parameter {
    value: f64,
    #[serde(default)]
    unit: String,
    basis: Origin,
    source: String,
}

/// Parameters of GPUs, drives, links and prices.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameters(BTreeMap<String, Parameter>);

/// The file, as JSON: an object per parameter, by name.
pub const PARAMETERS: &str = include_str!("../parameters.json");

/// Operations that the I/O kernel has in flight: its `GIO_WINDOW`.
const WINDOW: usize = 8;

impl Default for Parameters {
    /// Returns those of [`PARAMETERS`].
    fn default() -> Self {
        Self(serde_json::from_str(PARAMETERS).expect("a test reads the file"))
    }
}

impl Parameters {
    /// Replaces parameters by those of a file, which may have any of them.
    /// Returns what is wrong if the text has another form, or a name or a value cannot be.
    pub fn replace(&mut self, text: &str) -> Result<(), String> {
        let wrong = "no file of parameters";
        let found: BTreeMap<String, Value> = serde_json::from_str(text).map_err(|error| {
            let why = if error.is_data() { String::new() } else { format!(" ({error})") };
            format!("{wrong}: a JSON object has one for each, by name{why}")
        })?;
        found.into_iter().try_for_each(|(name, value)| {
            let form = r#"{"value": 7e9, "basis": "measured", "source": "where it is from"}"#;
            let parameter = serde_json::from_value(value)
                .map_err(|error| format!("{wrong}: {name}: {error}; it is written as {form}"))?;
            self.put(name, parameter)
        })
    }

    /// Replaces a parameter by a measured value.
    /// Returns what is wrong with the name or the value.
    pub fn set(&mut self, name: &str, value: f64, source: &str) -> Result<(), String> {
        let (unit, source) = (String::new(), source.to_owned());
        self.put(name.to_owned(), Parameter { value, unit, basis: Origin::Measured, source })
    }

    /// Replaces what a slack table says of its drives, which share their bandwidth evenly.
    /// Returns which value is outside of its range.
    pub fn set_costs(
        &mut self,
        costs: &IoCosts,
        drives: usize,
        source: &str,
    ) -> Result<(), String> {
        const LARGE: u64 = 64 << 20;
        const SMALL: u64 = 4096;
        // The slope of large batches is the bandwidth; the rest of a small one is the latency.
        let per_byte = |took: &dyn Fn(u64) -> Duration| {
            took(2 * LARGE).saturating_sub(took(LARGE)).as_secs_f64() / LARGE as f64
        };
        let drives = drives.max(1) as f64;
        let read = per_byte(&|bytes| costs.read.duration(bytes));
        let write = per_byte(&|bytes| costs.write.duration(bytes));
        let latency = costs.read.duration(SMALL).as_secs_f64() - SMALL as f64 * read;
        self.set("drive.read", (read * drives).recip(), source)?;
        self.set("drive.write", (write * drives).recip(), source)?;
        self.set("drive.latency", latency.max(1e-9) * 1e6, source)?;
        self.set("drive.mixed", costs.mixed, source)
    }

    fn put(&mut self, name: String, parameter: Parameter) -> Result<(), String> {
        let value = parameter.value;
        let Some(known) = self.0.get_mut(&name) else {
            return Err(format!("{name}: no such parameter"));
        };
        let most = if name == "drive.mixed" { LaneModel::FULL_DUPLEX } else { f64::MAX };
        // Times would not be representable with other values.
        let likely = known.value * 1e-9..=known.value * 1e9;
        if value.is_nan() || value > most || !likely.contains(&value) {
            return Err(format!("{name}: {value} is not above 0, or too large or too small"));
        }
        let unit = std::mem::take(&mut known.unit);
        *known = Parameter { unit, ..parameter };
        Ok(())
    }

    /// Returns the value of a parameter of the file.
    /// Panics if there is none of this name.
    pub fn value(&self, name: &str) -> f64 {
        match self.0.get(name) {
            Some(parameter) => parameter.value,
            None => panic!("{name}: no such parameter"),
        }
    }

    /// Returns the value of a parameter in microseconds as a time.
    pub(crate) fn micros(&self, name: &str) -> Duration {
        Duration::from_secs_f64(self.value(name) * 1e-6)
    }

    /// Returns a value in the unit of texts: GB/s, TFLOP/s, or %, where it is another one.
    pub(crate) fn scaled(&self, name: &str) -> f64 {
        let value = self.value(name);
        match self.0[name].unit.as_str() {
            "bytes/s" => value / 1e9,
            "FLOP/s" => value / 1e12,
            "of the peak" => value * 100.0,
            _ => value,
        }
    }

    /// Returns a value as text.
    pub(crate) fn text(&self, name: &str) -> String {
        match self.0.get(name).map(|it| it.unit.as_str()) {
            Some("us") => time(self.micros(name)),
            Some("bytes") => size(self.value(name) as u64),
            _ => self.scaled(name).to_string(),
        }
    }

    /// Returns a GPU.
    /// Panics if `name` is not one of [`Gpu::NAMES`].
    pub fn gpu(&self, name: &'static str) -> Gpu {
        let of = |what: &str| self.value(&format!("gpu.{name}.{what}"));
        Gpu {
            name,
            count: 1,
            bytes: of("bytes") as u64,
            flops: of("flops"),
            bandwidth: of("bandwidth"),
            linear: self.value("gpu.linear"),
            attention: self.value("gpu.attention"),
            memory: self.value("gpu.memory"),
            layer_overhead: self.micros("gpu.layer_overhead"),
        }
    }

    /// Returns the tiers of `drives` drives, and of the host memory, of `gpus` GPUs. Software paths
    /// have their bandwidth for each GPU, and never more than the drives; the direct path is
    /// limited by the links of the GPUs.
    pub fn storage(&self, drives: u32, gpus: u32) -> Storage {
        let (drives, gpus) = (f64::from(drives), f64::from(gpus));
        let of = |name: &str| self.value(name);
        let lane = |each: [f64; 2], window| LaneModel {
            read: (each[0] * gpus).min(of("drive.read") * drives),
            write: (each[1] * gpus).min(of("drive.write") * drives),
            latency: self.micros("drive.latency"),
            object: Duration::from_secs_f64((of("drive.iops") * drives.max(1.0)).recip()),
            set_up: Duration::ZERO,
            mixed: of("drive.mixed"),
            window,
        };
        let [link, gds, cpu] = ["host", "gds", "cpu"]
            .map(|path| ["read", "write"].map(|way| of(&format!("{path}.{way}"))));
        Storage {
            direct: lane(link, WINDOW),
            // The CPU submits everything immediately.
            gds: lane(gds, usize::MAX),
            cpu: lane(cpu, usize::MAX),
            host: LaneModel {
                read: link[0] * gpus,
                write: link[1] * gpus,
                latency: self.micros("host.latency"),
                mixed: LaneModel::FULL_DUPLEX,
                ..LaneModel::INSTANT
            },
            remote: self.net(of("central.bandwidth")),
            host_bytes: of("host.bytes") as u64,
            drive_bytes: (of("drive.bytes") * drives) as u64,
        }
    }

    /// Returns a network link of so many bytes a second in each direction.
    pub fn net(&self, bandwidth: f64) -> LaneModel {
        LaneModel {
            read: bandwidth,
            write: bandwidth,
            latency: self.micros("net.latency"),
            set_up: self.micros("net.message"),
            mixed: LaneModel::FULL_DUPLEX,
            ..LaneModel::INSTANT
        }
    }

    /// Returns the prices.
    pub fn prices(&self) -> Prices {
        let [gpu, dram_gb, drive_gb] =
            ["gpu", "dram", "drive"].map(|what| self.value(&format!("price.{what}")));
        Prices { gpu, dram_gb, drive_gb }
    }

    /// Returns the prices in words, and the paper that has them, if one has.
    pub(crate) fn price_words(&self) -> (String, &'static str) {
        let prices = self.prices();
        let Prices { gpu, dram_gb, drive_gb } = prices;
        let words = format!(
            "${gpu} an hour for a GPU, ${dram_gb} and ${drive_gb} for a gigabyte of host memory \
             and of drives"
        );
        let is_paper = prices == Self::default().prices();
        (words, if is_paper { " (Tutti, section 4.3)" } else { "" })
    }

    /// Describes the parameters that differ from [`PARAMETERS`], in words.
    pub fn replaced(&self) -> Vec<String> {
        let default = Self::default();
        let is_other = |(name, it): &(&String, &Parameter)| default.0.get(*name) != Some(*it);
        let line = |(name, it): (&String, &Parameter)| {
            let Parameter { value, unit, basis, source } = it;
            let basis = format!("{basis:?}").to_lowercase();
            let is_short = (1e-3..1e6).contains(&value.abs());
            let value = if is_short { value.to_string() } else { format!("{value:e}") };
            format!("{name} is {value} {unit} ({basis}: {source})").replace("  ", " ")
        };
        self.0.iter().filter(is_other).map(line).collect()
    }
}

impl Gpu {
    /// Returns an H100 SXM with the parameters of [`PARAMETERS`].
    pub fn h100() -> Self {
        Parameters::default().gpu("H100")
    }
}

#[cfg(test)]
mod tests {
    use kv_schedule::Curve;

    use super::*;

    #[test]
    fn the_file_has_what_the_code_asks_for() {
        let parameters = Parameters::default();
        let names = Gpu::NAMES.map(|name| parameters.gpu(name).name);
        assert_eq!(names, Gpu::NAMES);
        let storage = parameters.storage(2, 1);
        assert_eq!((storage.direct.read, storage.direct.write), (25.9e9, 9.8e9));
        assert_eq!(parameters.prices().gpu, 5.0);
        assert!(parameters.0.values().all(|it| !it.source.is_empty()));
    }

    #[test]
    fn files_replace_what_they_name() {
        let mut found = Parameters::default();
        let text = |name: &str, value: f64| {
            format!(r#"{{"{name}": {{"value": {value}, "basis": "measured", "source": "here"}}}}"#)
        };
        found.replace(&text("drive.read", 7e9)).unwrap();
        assert_eq!(found.storage(1, 1).direct.read, 7e9);
        assert_eq!(found.replaced(), ["drive.read is 7e9 bytes/s (measured: here)"]);
        for (text, wanted) in [
            (text("drive.raed", 1.0), "drive.raed: no such parameter"),
            (text("drive.read", 0.0), "drive.read: 0 is not above 0"),
            (text("drive.mixed", 2.5), "drive.mixed: 2.5 is not above 0, or too large"),
            ("[]".to_owned(), "no file of parameters: a JSON object has one for each"),
            (
                r#"{"drive.read": 7e9}"#.to_owned(),
                "no file of parameters: drive.read: invalid type: floating point",
            ),
        ] {
            let error = found.replace(&text).unwrap_err();
            assert!(error.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn costs_of_a_table_become_bandwidth_and_latency() {
        let curve = |gb: f64| Curve::line(Duration::from_micros(50), gb * 1e9).unwrap();
        let costs = IoCosts { read: curve(14.0), write: curve(5.0), mixed: 0.8 };
        let mut found = Parameters::default();
        found.set_costs(&costs, 2, "--table").unwrap();
        let lane = found.storage(2, 1).direct;
        assert!((lane.read / 14e9 - 1.0).abs() < 1e-3, "{lane:?}");
        assert!((lane.write / 5e9 - 1.0).abs() < 1e-3, "{lane:?}");
        assert!((lane.latency.as_secs_f64() / 50e-6 - 1.0).abs() < 1e-2, "{lane:?}");
        assert_eq!(lane.mixed, 0.8);
    }
}
