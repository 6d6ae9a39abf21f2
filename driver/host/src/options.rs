//! What a caller may choose when attaching to a controller.

use crate::clock::Nanos;

/// How the blocking calls wait for completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WaitMode {
    /// Poll the completion queue; [`crate::Clock::pause`] in between.
    #[default]
    Poll,
    /// Sleep until the controller's interrupt, or briefly: a lost interrupt costs time, not
    /// correctness, because the completion queue is polled all the same.
    Interrupt,
}

/// How data is described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DescriptorPreference {
    /// SGLs where the controller has them (SGLS), else PRPs.
    #[default]
    Auto,
    /// SGLs, or an error.
    Sgl,
    /// PRPs, which every controller has.
    Prp,
}

/// Options of [`crate::Controller::attach`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerOptions {
    /// Queue pairs to ask for, to be granted to executors. One more is asked for, for the driver's
    /// own blocking calls. The controller may give fewer: see [`crate::ControllerInfo::io_queues`].
    pub io_queues: u16,
    /// Depth that `create_queue_pair(0)` takes, cut to what the controller allows.
    pub io_depth: u32,
    /// Commands the blocking calls keep in flight.
    pub host_depth: u16,
    /// Bounce buffer of each of them in bytes; transfers are split at this or at MDTS.
    pub bounce_bytes: u32,
    /// Descriptor area of each entry of a granted queue in bytes; a power of two.
    pub descriptor_bytes: u32,
    /// How long an I/O command may take before it is aborted.
    pub command_timeout: Nanos,
    /// How long an admin command may take before it is aborted.
    pub admin_timeout: Nanos,
    /// How long Format NVM may take.
    pub format_timeout: Nanos,
    /// How long an aborted command may take to complete before the next step is taken.
    pub abort_grace: Nanos,
    /// How the blocking calls wait.
    pub wait: WaitMode,
    /// How data is described.
    pub descriptors: DescriptorPreference,
    /// Tell the controller about the shutdown when the [`crate::Controller`] is dropped. Without
    /// it a drop only disables the controller, as a crash of the host would.
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
    /// The same with every number in the range the driver can work with.
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
