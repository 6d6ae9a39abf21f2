// The kernels that work on the KV pool, as nvcc sees them: `cargo xtask ptx` makes gio_pool.ptx.
#include "pool/kernel.cuh"
