//! Report on the GPU of `--executor cuda`.

#![allow(unsafe_code, reason = "sets an environment variable that the NVIDIA driver reads")]

use gio_kernels::cuda::{CudaDriver, CudaReport, LaunchMode, StreamKind};
use serde::Serialize;

/// Sets the driver's environment variables. Must run while this process has one thread.
pub(crate) fn set_environment() {
    // SAFETY: no other thread exists that could read or write the environment.
    unsafe { CudaDriver::set_environment() };
}

/// The GPU that ran the I/O kernel. Field names are the JSON keys.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GpuReport {
    /// CUDA device number.
    pub(crate) gpu: u32,
    pub(crate) name: String,
    pub(crate) pci: String,
    /// The CUDA version that the driver implements.
    pub(crate) driver: String,
    pub(crate) compute_capability: String,
    pub(crate) sms: u32,
    /// SMs requested; the next field is the number the I/O kernel may run on.
    pub(crate) io_sms_asked: Option<u32>,
    pub(crate) io_sms_granted: u32,
    /// "green context" or "priority stream".
    pub(crate) partition: &'static str,
    /// Reason why the I/O kernel has no SMs of its own; null if it has.
    pub(crate) partition_missing: Option<String>,
    /// "per-batch" or "resident".
    pub(crate) launch: &'static str,
    /// GPUs whose kernels see a peer's writes to this GPU's memory in order.
    pub(crate) writes_ordering: String,
}

impl GpuReport {
    pub(crate) fn new(report: &CudaReport) -> Self {
        let CudaReport { device, partition, mode, .. } = report;
        let (major, minor) = device.capability;
        let version = device.driver_version;
        let missing = match &partition.kind {
            StreamKind::Priority { instead, .. } => instead.clone(),
            StreamKind::Green => None,
        };
        Self {
            gpu: device.ordinal,
            name: device.name.clone(),
            pci: device.pci.clone(),
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
            compute_capability: format!("{major}.{minor}"),
            sms: device.sms,
            io_sms_asked: partition.asked,
            io_sms_granted: partition.granted,
            partition: match partition.kind {
                StreamKind::Green => "green context",
                StreamKind::Priority { .. } => "priority stream",
            },
            partition_missing: missing,
            launch: match mode {
                LaunchMode::PerBatch => "per-batch",
                LaunchMode::Resident => "resident",
            },
            writes_ordering: device.writes_ordering.to_string(),
        }
    }

    /// Returns a short description of the GPU.
    pub(crate) fn device_words(&self) -> String {
        format!("GPU {} {} at {}", self.gpu, self.name, self.pci)
    }

    /// Returns a short description of how the I/O kernel was launched.
    pub(crate) fn kernel_words(&self) -> String {
        let launch = match self.launch {
            "resident" => "resident kernel",
            _ => "a launch per batch",
        };
        format!("{launch} on {}", self.partition_words())
    }

    /// Returns a short description of the SM partition.
    pub(crate) fn partition_words(&self) -> String {
        let asked = self.io_sms_asked.unwrap_or(self.io_sms_granted);
        let Self { io_sms_granted, sms, partition, .. } = self;
        match &self.partition_missing {
            None => format!("{io_sms_granted} of {sms} SMs ({asked} asked for), {partition}"),
            Some(why) => format!("all {sms} SMs, NOT {asked} of its own: {why}; {partition}"),
        }
    }
}
