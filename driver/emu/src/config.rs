//! Configuration of a software controller: its identity, its limits and its namespaces.

use std::sync::Arc;

use nvme_driver::{Nanos, platform::passthrough::Passthrough};

use crate::{fault::FaultPlan, media::Media, power::PowerSwitch};

/// SGL support of the controller (SGLS bits 1:0 of the identify data).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SglSupport {
    /// PRPs only.
    None,
    /// SGLs of any address and length.
    #[default]
    Byte,
    /// SGLs whose addresses and lengths are multiples of four bytes.
    Dword,
}

/// One namespace; its identifier is its position in the list, counted from 1.
#[derive(Debug)]
pub struct NamespaceConfig {
    /// Storage of the bytes.
    pub media: Box<dyn Media>,
    /// Bytes of a logical block: 512 or 4096.
    pub lba_bytes: u32,
    /// Granularity and alignment of deallocations in bytes (NPDG, NPDA); `None`: not reported.
    pub deallocate_bytes: Option<u32>,
}

/// Flexible Data Placement with one reclaim group, whose reclaim unit handles are available to all
/// namespaces. [`MediaOp::placement`](crate::MediaOp::placement) has the handle of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementConfig {
    /// Number of placement handles, up to 127.
    pub handles: u16,
    /// Bytes of a reclaim unit.
    pub reclaim_unit_bytes: u64,
}

impl NamespaceConfig {
    /// Creates a namespace as large as `media`.
    #[must_use]
    pub fn new(media: impl Media + 'static, lba_bytes: u32) -> Self {
        Self { media: Box::new(media), lba_bytes, deallocate_bytes: None }
    }

    /// Returns the number of whole blocks on the medium.
    fn lbas(&self) -> u64 {
        self.media.capacity_bytes() / u64::from(self.lba_bytes.max(1))
    }
}

/// Configuration of a controller. The default is a good modern drive without namespaces.
#[derive(Debug)]
pub struct EmuConfig {
    /// Display name, such as `emu0`.
    pub id: String,
    /// Serial number, up to 20 characters of ASCII.
    pub serial: String,
    /// Model, up to 40 characters of ASCII.
    pub model: String,
    /// Firmware revision, up to 8 characters of ASCII.
    pub firmware: String,
    /// Namespaces 1, 2, ...
    pub namespaces: Vec<NamespaceConfig>,
    /// Largest number of I/O queue pairs granted.
    pub io_queues_max: u16,
    /// Largest queue depth. A count: CAP.MQES holds one less.
    pub mqes: u16,
    /// Largest transfer of one command in bytes, a power of two of at least 8192 (MDTS cannot
    /// express one page: 0 means no limit); `None`: no limit.
    pub mdts_bytes: Option<u32>,
    /// SGL support.
    pub sgl: SglSupport,
    /// Set if SGLs may have bit bucket descriptors.
    pub bit_bucket: bool,
    /// Set if a volatile write cache is reported.
    pub vwc: bool,
    /// Doorbells are `4 << dstrd` bytes apart.
    pub dstrd: u8,
    /// Number of interrupt vectors.
    pub vectors: u16,
    /// CAP.TO: time limit for enabling, rounded up to 500 ms.
    pub ready_timeout: Nanos,
    /// CAP.NSSRS: set if the host can reset the whole subsystem.
    pub subsystem_reset: bool,
    /// PCI vendor and device, as its bus reports them.
    pub pci_id: Option<(u16, u16)>,
    /// CAP.CQR: set if queues must be contiguous.
    pub contiguous_queues: bool,
    /// Flexible Data Placement, if supported.
    pub placement: Option<PlacementConfig>,
    /// Faults to inject.
    pub faults: FaultPlan,
    /// Power switch, for tests that cut the power; several controllers may share one.
    pub power: Option<PowerSwitch>,
    /// The drive of the only namespace, which answers questions about itself.
    pub drive: Option<Arc<Passthrough>>,
}

impl Default for EmuConfig {
    fn default() -> Self {
        Self {
            id: "emu0".into(),
            serial: "RIPIENO0000000001".into(),
            model: "Ripieno software controller".into(),
            firmware: "1.0".into(),
            namespaces: Vec::new(),
            io_queues_max: 64,
            mqes: 1024,
            mdts_bytes: Some(512 << 10),
            sgl: SglSupport::Byte,
            bit_bucket: true,
            vwc: true,
            dstrd: 0,
            vectors: 65,
            ready_timeout: Nanos::from_millis(2500),
            subsystem_reset: false,
            pci_id: None,
            contiguous_queues: true,
            placement: None,
            faults: FaultPlan::default(),
            power: None,
            drive: None,
        }
    }
}

impl EmuConfig {
    /// Creates the default drive called `id`.
    #[must_use]
    pub fn new(id: impl Into<String>) -> Self {
        let id = id.into();
        Self { serial: format!("RIPIENO-{}", &id), id, ..Self::default() }
    }

    /// Adds a namespace.
    #[must_use]
    pub fn namespace(mut self, media: impl Media + 'static, lba_bytes: u32) -> Self {
        self.namespaces.push(NamespaceConfig::new(media, lba_bytes));
        self
    }

    /// Sets the fault plan.
    #[must_use]
    pub fn faults(self, faults: FaultPlan) -> Self {
        Self { faults, ..self }
    }

    /// Checks that the configuration is valid.
    ///
    /// # Errors
    /// Returns [`ConfigError`] for the first invalid value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let bad = |field: &'static str, found: String, rule: &'static str| {
            Err(self.wrong(format!("{field} is {found}; it has to be {rule}")))
        };
        for (field, text, max) in [
            ("serial", &self.serial, 20),
            ("model", &self.model, 40),
            ("firmware", &self.firmware, 8),
        ] {
            if text.len() > max || !text.bytes().all(|byte| (0x20..0x7F).contains(&byte)) {
                let rule = "printable ASCII, at most 20 (serial), 40 (model), 8 (firmware) long";
                return bad(field, format!("{text:?}"), rule);
            }
        }
        if self.id.is_empty() {
            return bad("id", "nothing".into(), "a name");
        }
        if self.io_queues_max == 0 {
            return bad("io_queues_max", "0".into(), "at least 1");
        }
        if self.mqes < 2 {
            return bad("mqes", self.mqes.to_string(), "at least 2 entries");
        }
        let mdts_fits = |bytes: u32| bytes >= 8192 && bytes.is_power_of_two();
        if let Some(bytes) = self.mdts_bytes.filter(|bytes| !mdts_fits(*bytes)) {
            return bad("mdts_bytes", bytes.to_string(), "a power of two, at least 8192");
        }
        if self.dstrd > 15 {
            return bad("dstrd", self.dstrd.to_string(), "at most 15");
        }
        if self.vectors == 0 {
            return bad("vectors", "0".into(), "at least 1, for the admin queue");
        }
        if let Some(placement) = self.placement {
            if !(1..=127).contains(&placement.handles) {
                return bad("placement.handles", placement.handles.to_string(), "1 to 127");
            }
            if placement.reclaim_unit_bytes == 0 {
                return bad("placement.reclaim_unit_bytes", "0".into(), "at least 1");
            }
        }
        for (index, namespace) in self.namespaces.iter().enumerate() {
            self.validate_namespace(index + 1, namespace)?;
        }
        if let Some((rule, found, remedy)) = self.faults.invalid() {
            let rule = format!("fault rule {rule} (counted from 0)");
            return Err(self.wrong(format!("{rule} has {found}; {remedy}")));
        }
        Ok(())
    }

    fn wrong(&self, problem: String) -> ConfigError {
        ConfigError { id: self.id.clone(), problem }
    }

    fn validate_namespace(&self, nsid: usize, of: &NamespaceConfig) -> Result<(), ConfigError> {
        let bad = |found: String, rule: &'static str| {
            Err(self.wrong(format!("namespace {nsid} has {found}; {rule}")))
        };
        if of.lba_bytes != 512 && of.lba_bytes != 4096 {
            return bad(format!("blocks of {} bytes", of.lba_bytes), "use 512 or 4096");
        }
        if of.lbas() == 0 {
            return bad("a medium smaller than one block".into(), "use a larger medium");
        }
        if let Some(bytes) = of.deallocate_bytes
            && !(bytes > 0 && bytes.is_multiple_of(4096) && bytes / 512 <= 65_536)
        {
            let found = format!("deallocations in multiples of {bytes} bytes");
            return bad(found, "use a multiple of 4096, up to 32 MiB");
        }
        if !of.lba_bytes.is_multiple_of(of.media.granularity_bytes().max(1)) {
            let unit = of.media.granularity_bytes();
            let found = format!("blocks of {} bytes on a medium with {unit}", of.lba_bytes);
            return bad(found, "use larger blocks, or open the file without direct I/O");
        }
        Ok(())
    }
}

/// An invalid value of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{id}: {problem}")]
pub struct ConfigError {
    /// The controller.
    pub id: String,
    /// The field or rule, its value, and the values that work.
    pub problem: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::MemoryMedia;

    #[test]
    fn defaults_are_valid() {
        let media = MemoryMedia::new(1 << 20).unwrap();
        let config = EmuConfig::new("emu7").namespace(media, 4096);
        config.validate().unwrap();
        assert_eq!(config.namespaces[0].lbas(), 256);
        assert_eq!(config.serial, "RIPIENO-emu7");
    }

    #[test]
    fn impossible_controllers_are_refused() {
        let base = EmuConfig::default;
        let media = || MemoryMedia::new(100).unwrap();
        let placement =
            |handles, reclaim_unit_bytes| Some(PlacementConfig { handles, reclaim_unit_bytes });
        let mut odd = base().namespace(MemoryMedia::new(4096).unwrap(), 512);
        odd.namespaces[0].deallocate_bytes = Some(512);
        let cases = [
            (EmuConfig { serial: "x".repeat(21), ..base() }, "serial"),
            (EmuConfig { model: "caf\u{e9}".into(), ..base() }, "model"),
            (EmuConfig { io_queues_max: 0, ..base() }, "io_queues_max"),
            (EmuConfig { mqes: 1, ..base() }, "mqes"),
            (EmuConfig { mdts_bytes: Some(5000), ..base() }, "mdts_bytes"),
            (EmuConfig { dstrd: 16, ..base() }, "dstrd"),
            (EmuConfig { vectors: 0, ..base() }, "vectors"),
            (EmuConfig { placement: placement(0, 1), ..base() }, "placement.handles"),
            (EmuConfig { placement: placement(128, 1), ..base() }, "placement.handles"),
            (EmuConfig { placement: placement(1, 0), ..base() }, "reclaim_unit_bytes"),
            (odd, "multiples of 512"),
            (base().namespace(media(), 520), "520"),
            (base().namespace(media(), 512), "smaller than one block"),
        ];
        for (config, word) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
