// The kernels of gio_pool for host threads.
#define GIO_HOST 1
#include "pool/kernel.cuh"
