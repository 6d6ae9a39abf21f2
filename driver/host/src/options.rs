//! Options for attaching to a controller.

use crate::clock::Nanos;

/// Wait strategy of the blocking calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WaitMode {
    /// Poll the completion queue, calling [`crate::Clock::pause`] between polls.
    #[default]
    Poll,
    /// Sleep until the controller's interrupt, or briefly: the completion queue is polled as well,
    /// so a lost interrupt costs time, not correctness.
    Interrupt,
}

/// Preferred format of data pointers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DescriptorPreference {
    /// SGLs if the controller supports them (SGLS), else PRPs.
    #[default]
    Auto,
    /// SGLs; attaching fails without support.
    Sgl,
    /// PRPs, which every controller supports.
    Prp,
}

/// Options of [`crate::Controller::attach`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerOptions {
    /// Queue pairs to request for executors. The driver requests one more for its own blocking
    /// calls. The controller may grant fewer: see [`crate::ControllerInfo::io_queues`].
    pub io_queues: u16,
    /// Depth that `create_queue_pair(0)` uses, cut to the controller's limit.
    pub io_depth: u32,
    /// Commands that the blocking calls keep in flight.
    pub host_depth: u16,
    /// Bounce buffer bytes per command in flight; transfers are split at this or at MDTS.
    pub bounce_bytes: u32,
    /// Descriptor area bytes per entry of a granted queue; a power of two.
    pub descriptor_bytes: u32,
    /// Time limit of an I/O command; it is aborted after that.
    pub command_timeout: Nanos,
    /// Time limit of an admin command; it is aborted after that.
    pub admin_timeout: Nanos,
    /// Time limit of Format NVM.
    pub format_timeout: Nanos,
    /// Time that an aborted command has to complete before recovery escalates.
    pub abort_grace: Nanos,
    /// Wait mode of the blocking calls.
    pub wait: WaitMode,
    /// Preferred format of data pointers.
    pub descriptors: DescriptorPreference,
    /// Announce the shutdown to the controller when the [`crate::Controller`] is dropped. Without
    /// it, a drop only disables the controller, like a crash of the host.
    pub shutdown_on_drop: bool,
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self {
            io_queues: 16,
            io_depth: 256,
            host_depth: 16,
            bounce_bytes: 256 << 10,
            descriptor_bytes: 4096,
            command_timeout: Nanos::from_millis(30_000),
            admin_timeout: Nanos::from_millis(60_000),
            format_timeout: Nanos::from_millis(600_000),
            abort_grace: Nanos::from_millis(1_000),
            wait: WaitMode::Poll,
            descriptors: DescriptorPreference::Auto,
            shutdown_on_drop: true,
        }
    }
}

impl ControllerOptions {
    /// Clamps every number to the supported range.
    pub(crate) fn clamped(mut self) -> Self {
        self.io_queues = self.io_queues.min(0xFFFD);
        self.io_depth = self.io_depth.clamp(2, crate::cid::DEPTH_MAX);
        self.host_depth = self.host_depth.clamp(1, 1024);
        // One LBA of 64 KiB must fit.
        self.bounce_bytes = self.bounce_bytes.clamp(64 << 10, 16 << 20).next_multiple_of(64 << 10);
        self.descriptor_bytes = self.descriptor_bytes.clamp(64, 4096).next_power_of_two();
        self
    }
}
