// The I/O kernel for host threads: gio_host_run.
#define GIO_HOST 1
#include "gio/engine.cuh"
