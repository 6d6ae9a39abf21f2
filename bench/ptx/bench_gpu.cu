// Kernels of the GPU benchmarks: `cargo xtask ptx` makes bench_gpu.ptx of it.
#include "crc.cuh"
#include "instant.cuh"
#include "matmul.cuh"
#include "place.cuh"
#include "read.cuh"
