//! Names of what a step may need from the machine; `needs` gets it.

/// Something that a step needs and that a machine may lack. The first ones are got first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A C++ compiler.
    Cxx,
    /// The crates of Cargo.lock.
    Crates,
    /// The C++ compiler of GNU.
    Gxx,
    /// That of GNU for 64-bit Arm.
    GxxAarch64,
    /// `strip`.
    Binutils,
    Mmdebstrap,
    /// libnuma.
    Numa,
    /// `pkg-config`.
    PkgConfig,
    /// `valgrind`.
    Valgrind,
    /// Python that makes virtual environments.
    Python,
    /// QEMU for machines.
    Qemu,
    /// QEMU for single programs.
    QemuUser,
    /// The kernel and the busybox of the virtual machine, in `target/vm`.
    Guest,
    /// Builds and tests the Python package, in `target/python`.
    PythonTools,
    /// NVIDIA's compiler, in `target/ptx`.
    Nvcc,
    /// vLLM for the CPU, in `target/engine`.
    Vllm,
    /// bindgen and the libclang that it asks, in `target/abi`.
    Bindgen,
    /// cargo-deny, in `target/tools`.
    CargoDeny,
}

impl Need {
    /// Whether no step can do without it. Steps that need something else are skipped without it.
    pub fn is_essential(self) -> bool {
        matches!(self, Self::Cxx | Self::Crates)
    }
}
