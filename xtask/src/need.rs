//! Names of requirements of a step; `needs` provides them.

use std::collections::BTreeMap;

/// A requirement of a step that a machine may lack. Provided in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A C++ compiler.
    Cxx,
    /// The crates of Cargo.lock.
    Crates,
    /// GNU's C++ compiler.
    Gxx,
    /// GNU's C++ compiler and Rust's library for 64-bit Arm.
    GxxAarch64,
    /// `strip`.
    Binutils,
    /// `cmake`.
    Cmake,
    /// `dpkg-shlibdeps`.
    DpkgDev,
    Mmdebstrap,
    /// libnuma.
    Numa,
    /// `pkg-config`.
    PkgConfig,
    /// `valgrind`.
    Valgrind,
    /// Python with support for virtual environments.
    Python,
    /// QEMU for whole machines.
    Qemu,
    /// QEMU for single programs.
    QemuUser,
    /// Prometheus' checks of metrics and queries.
    Promtool,
    /// The kernel and the busybox of the virtual machine, in `target/vm`.
    Guest,
    /// Tools to build and test the Python package, in `target/python`.
    PythonTools,
    /// NVIDIA's compiler, in `target/ptx`.
    Nvcc,
    /// vLLM for the CPU, in `target/engine`.
    Vllm,
    /// bindgen and its libclang, in `target/abi`.
    Bindgen,
    /// mdBook, in `target/book`.
    Mdbook,
    /// cargo-deny, in `target/deny`.
    CargoDeny,
    /// cargo-deb, in `target/tools`.
    CargoDeb,
    /// cargo-bundle-licenses, in `target/tools`.
    BundleLicenses,
    /// RustSec's database of advisories, in cargo's home.
    Advisories,
    /// The oldest Rust toolchain that the workspace supports.
    OldestRust,
    /// Runtimes of the sanitizers, in the Rust toolchain.
    Sanitizers,
    /// llvm-cov and llvm-profdata, in `target/coverage`.
    LlvmTools,
}

impl Need {
    /// Returns true if every step needs it. Steps are skipped without their other needs.
    pub fn is_essential(self) -> bool {
        matches!(self, Self::Cxx | Self::Crates)
    }
}

/// Unsatisfied needs of a run, each with a one-line reason.
#[derive(Debug, Default)]
pub struct Lacking(BTreeMap<Need, String>);

impl Lacking {
    /// Returns the reason if `need` is unsatisfied.
    pub fn why(&self, need: Need) -> Option<&str> {
        self.0.get(&need).map(String::as_str)
    }

    /// Adds a need that could not be satisfied.
    pub fn add(&mut self, need: Need, why: &str) {
        self.0.insert(need, why.to_owned());
    }

    #[cfg(test)]
    pub fn only(need: Need, why: &str) -> Self {
        Self([(need, why.to_owned())].into())
    }
}
