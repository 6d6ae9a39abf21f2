//! Errors of the GPU interface.

use std::fmt;

use gio_uring::ExecutorError;

/// Name of the executor in reports and errors.
pub(super) const NAME: &str = "cuda";

/// A `CUresult` as a number: a newer driver may return errors unknown to this code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ErrorCode(pub i32);

impl ErrorCode {
    /// `CUDA_SUCCESS`.
    pub const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: Self = Self(1);
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_NO_DEVICE`.
    pub const NO_DEVICE: Self = Self(100);
    /// `CUDA_ERROR_NOT_READY`: not an error, the queried work is still running.
    pub const NOT_READY: Self = Self(600);
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: Self = Self(801);

    /// Returns true if "the process is in an inconsistent state and any further CUDA work will
    /// return the same error" (cuda.h), or if the device is lost.
    #[must_use]
    pub fn is_sticky(self) -> bool {
        matches!(
            self.0,
            // ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED
            214 | 220 | 226
            // ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, ASSERT
            | 700 | 702 | 709 | 710
            // HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION, MISALIGNED_ADDRESS,
            // INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED, TENSOR_MEMORY_LEAK
            | 714
                ..=719 | 721
            // MPS_CLIENT_TERMINATED, EXTERNAL_DEVICE
            | 810 | 911
        )
    }

    /// Returns advice on the error, as far as the number tells.
    fn hint(self) -> &'static str {
        match self.0 {
            2 => "; free GPU or pinned memory, or raise the lock limit (ulimit -l)",
            34 => "; this is the toolkit's stub: let the loader find the driver's libcuda.so.1",
            209 | 218 => "; the kernel's PTX needs a newer GPU",
            221 => "; install the driver's PTX compiler (libnvidia-ptxjitcompiler)",
            222 => "; update the driver: it is older than the CUDA that made the kernel's PTX",
            712 => "; the same pages are registered already, perhaps by the engine",
            800 => {
                "; to register another device's registers, load the NVIDIA module with \
                 NVreg_RegistryDwords=PeerMappingOverride=1, or give the process CAP_SYS_ADMIN; \
                 to lock memory, raise ulimit -l"
            }
            801 => "; this GPU, driver or virtual machine cannot do it",
            803 | 804 => "; reboot, or load the kernel module of the installed driver",
            code if Self(code).is_sticky() => {
                "; nothing can be done on the GPU by this process any more: start it anew"
            }
            _ => "",
        }
    }
}

/// The GPU could not be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver was found.
    #[error("no NVIDIA driver: libcuda.so.1 was not found; install the driver")]
    NoLibrary,
    /// The driver lacks required functions.
    #[error(
        "the NVIDIA driver is too old: it is {found} and lacks {lacks}; update it (R580 or later \
         is best)"
    )]
    OldDriver {
        /// Its version.
        found: String,
        /// Missing functions.
        lacks: String,
    },
    /// The driver sees no GPU.
    #[error(
        "the NVIDIA driver sees no GPU (nvidia-smi lists them; CUDA_VISIBLE_DEVICES may hide \
         them)"
    )]
    NoDevice,
    /// The ordinal is out of range.
    #[error("GPU {ordinal} was asked for, there are {count}, from 0 on")]
    NoSuchDevice {
        /// Requested ordinal.
        ordinal: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// A driver call failed.
    #[error("{what}: {call} returned {name} ({}){}", code.0, code.hint())]
    Call {
        /// The operation in progress.
        what: String,
        /// The function.
        call: &'static str,
        /// Its return code.
        code: ErrorCode,
        /// Name and meaning of the code.
        name: String,
    },
    /// The driver failed to compile a kernel.
    #[error(
        "compiling the PTX of {header} for compute capability {capability} failed: \
         {name} ({}){}; the compiler says: {log}", code.0, code.hint()
    )]
    Compile {
        /// Name, version and target of the PTX.
        header: String,
        /// Compute capability of the GPU.
        capability: String,
        /// The driver's return code.
        code: ErrorCode,
        /// Name and meaning of the code.
        name: String,
        /// The compiler's own message.
        log: String,
    },
    /// A drive's doorbells could not be mapped into the GPU.
    #[error("{cause}; {hint}")]
    Doorbells {
        /// The driver's error.
        cause: Box<CudaError>,
        /// Advice for this Linux kernel.
        hint: String,
    },
    /// An argument is invalid.
    #[error("{0}")]
    Argument(String),
}

impl CudaError {
    /// Returns the driver's code, if a call failed.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Call { code, .. } | Self::Compile { code, .. } => Some(*code),
            Self::Doorbells { cause, .. } => cause.code(),
            _ => None,
        }
    }

    /// Adds advice on doorbells that could not be mapped on Linux `release`. Other codes have a
    /// hint of their own.
    pub(super) fn of_doorbells(self, release: &str) -> Self {
        if self.code() != Some(ErrorCode::INVALID_VALUE) {
            return self;
        }
        let mut parts = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
        let kernel: [u32; 2] = [parts.next().unwrap_or(0), parts.next().unwrap_or(0)];
        let hint = if kernel >= [6, 12] {
            format!(
                "on Linux {release} the NVIDIA driver has to be 570.133.07 or later to map another \
                 device's registers"
            )
        } else {
            "the registers have to be one mapping of vfio-pci, in whole pages; a driver of \
             570.133.07 or later maps them on all kernels"
                .to_owned()
        };
        Self::Doorbells { cause: Box::new(self), hint }
    }
}

impl From<CudaError> for ExecutorError {
    fn from(error: CudaError) -> Self {
        Self::Failed { executor: NAME, cause: error.to_string() }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA error {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_have_a_hint_for_the_code_and_the_kernel() {
        let failed = |code| CudaError::Call {
            what: "mapping".into(),
            call: "cuMemHostRegister",
            code: ErrorCode(code),
            name: "NAME".into(),
        };
        for (code, release, hint) in [
            (1, "6.12.3-amd64", "on Linux 6.12.3-amd64 the NVIDIA driver has to be 570.133.07"),
            (1, "7.0.0", "has to be 570.133.07"),
            (1, "6.8.0-51-generic", "one mapping of vfio-pci"),
            (800, "6.12.3-amd64", "PeerMappingOverride=1"),
            (801, "6.8.0", "cannot do it"),
        ] {
            let error = failed(code).of_doorbells(release);
            assert_eq!(error.code(), Some(ErrorCode(code)));
            assert!(error.to_string().contains(hint), "{error}");
        }
    }

    #[test]
    fn what_kills_a_kernel_is_sticky_and_what_refuses_a_call_is_not() {
        for code in [214, 700, 702, 710, 716, 719] {
            assert!(ErrorCode(code).is_sticky(), "{code}");
            assert!(ErrorCode(code).hint().contains("start it anew"), "{code}");
        }
        for code in [0, 1, 2, 222, 400, 600, 701, 720, 801, 900, 999, 123_456] {
            assert!(!ErrorCode(code).is_sticky(), "{code}");
        }
    }
}
