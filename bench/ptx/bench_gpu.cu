// The kernel of the GPU benchmarks: `cargo xtask ptx` makes bench_gpu.ptx of it.
#include "instant.cuh"
