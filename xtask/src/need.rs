//! Names of what a step may need from the machine; `needs` gets it.

/// Something that a step needs and that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A C++ compiler.
    Cxx,
    /// That of GNU.
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
    /// Python that makes virtual environments.
    Python,
    /// QEMU for x86-64.
    Qemu,
    /// The kernel and the busybox of the virtual machine, in `target/vm`.
    Guest,
    /// NVIDIA's compiler, in `target/ptx`.
    Nvcc,
    /// vLLM for the CPU, in `target/engine`.
    Vllm,
    /// bindgen and the libclang that it asks, in `target/abi`.
    Bindgen,
    /// cargo-deny, in `target/tools`.
    CargoDeny,
}
