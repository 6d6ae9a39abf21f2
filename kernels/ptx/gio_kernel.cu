// The I/O kernel for the GPU, as nvcc sees it: `cargo xtask ptx` makes gio_kernel.ptx of it.
#include "gio/engine.cuh"
