// The I/O kernel for host threads: gio_host_run.
#define GIO_HOST 1
#include "gio/engine.cuh"

// Returns the CRC-32C of an object.
extern "C" uint32_t gio_host_checksum(uint64_t at, uint32_t bytes) {
  return gio_crc_by(gio_crc_best(), at, bytes);
}
