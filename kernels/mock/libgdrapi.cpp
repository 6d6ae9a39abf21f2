// A libgdrapi without a GPU: maps the memory of the mock's libcuda again, like a BAR.
//
// It is stricter than GDRCopy: a range must be whole GPU pages, and SYNC_MEMOPS must be set.
// MOCK_GDR=off simulates a missing kernel module; with MOCK_GDR=cached host and GPU are coherent,
// unless a pin requests PCIe, and with MOCK_GDR=stubborn even then. gdr_pin_buffer_v2 was added in
// 2.5: the mock of MOCK_LEVEL 12 lacks it. Calls are counted and fail together with those of
// libcuda.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>

#define EXPORT extern "C" __attribute__((visibility("default")))

static const size_t PAGE = 65536;

struct Pin {
  uint64_t start;
  size_t len;
  void *mapped;
  bool pcie;
};
struct Driver {
  std::set<Pin *> pins;
};
struct Handle {
  unsigned long h;
};
struct Info {
  uint64_t va, mapped_size;
  uint32_t page_size;
  uint64_t tm_cycles;
  uint32_t cycles_per_ms;
  unsigned mapped : 1, wc_mapping : 1;
  int mapping_type;
};
static_assert(sizeof(Info) == 48, "as in gdrapi.h");

// Returns a function of the mock's libcuda, which the calling process has loaded.
template <class T> static T in_cuda(const char *name) {
  static void *cuda = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<T>(cuda == nullptr ? nullptr : dlsym(cuda, name));
}
static int begin(const char *call) {
  const auto ask = in_cuda<int (*)(const char *)>("mock_begin");
  return ask == nullptr ? ENODEV : ask(call);
}
static int change(const Pin &pin, int by, size_t *offset) {
  return in_cuda<int (*)(uint64_t, size_t, int, size_t *)>("mock_pin")(pin.start, pin.len, by,
                                                                      offset);
}
static Pin *pin_of(Driver *driver, Handle handle) {
  Pin *pin = reinterpret_cast<Pin *>(handle.h);
  return driver->pins.count(pin) != 0u ? pin : nullptr;
}

EXPORT void gdr_runtime_get_version(int *major, int *minor) {
  *major = 2;
  *minor = 5;
}
EXPORT int gdr_driver_get_version(void *, int *major, int *minor) {
  *major = 2;
  *minor = 4;
  return begin("gdr_driver_get_version");
}
EXPORT void *gdr_open() {
  const char *text = getenv("MOCK_GDR");
  if ((text != nullptr && strcmp(text, "off") == 0) || begin("gdr_open") != 0) return nullptr;
  return new Driver;
}
EXPORT int gdr_close(void *driver) {
  const int failed = begin("gdr_close");
  if (failed != 0) return failed;
  delete static_cast<Driver *>(driver);
  return 0;
}
static int pin_range(void *driver, unsigned long start, size_t len, bool pcie, Handle *handle) {
  if (start % PAGE != 0u || len == 0u || len % PAGE != 0u) return EINVAL;
  size_t offset = 0;
  const Pin pin = {start, len, nullptr, pcie};
  if (change(pin, 1, &offset) < 0) return EINVAL;
  Pin *made = new Pin(pin);
  static_cast<Driver *>(driver)->pins.insert(made);
  handle->h = reinterpret_cast<unsigned long>(made);
  return 0;
}
EXPORT int gdr_pin_buffer(void *driver, unsigned long start, size_t len, uint64_t token,
                          uint32_t space, Handle *handle) {
  const int failed = begin("gdr_pin_buffer");
  if (failed != 0) return failed;
  if (token != 0u || space != 0u) return EINVAL;
  return pin_range(driver, start, len, false, handle);
}
#if MOCK_LEVEL != 12
EXPORT int gdr_pin_buffer_v2(void *driver, unsigned long start, size_t len, uint32_t flags,
                             Handle *handle) {
  const int failed = begin("gdr_pin_buffer_v2");
  if (failed != 0) return failed;
  if (flags > 1u) return EINVAL;
  return pin_range(driver, start, len, flags == 1u, handle);
}
#endif
EXPORT int gdr_unpin_buffer(void *driver, Handle handle) {
  const int failed = begin("gdr_unpin_buffer");
  if (failed != 0) return failed;
  Pin *pin = pin_of(static_cast<Driver *>(driver), handle);
  if (pin == nullptr || pin->mapped != nullptr) return EINVAL;
  size_t offset = 0;
  change(*pin, -1, &offset);
  static_cast<Driver *>(driver)->pins.erase(pin);
  delete pin;
  return 0;
}
EXPORT int gdr_get_info_v2(void *driver, Handle handle, Info *info) {
  const int failed = begin("gdr_get_info_v2");
  if (failed != 0) return failed;
  const Pin *pin = pin_of(static_cast<Driver *>(driver), handle);
  if (pin == nullptr) return EINVAL;
  // Write-combining, or cached if host and GPU are coherent.
  const char *text = getenv("MOCK_GDR");
  const bool stubborn = text != nullptr && strcmp(text, "stubborn") == 0;
  const bool cached = stubborn || (text != nullptr && strcmp(text, "cached") == 0 && !pin->pcie);
  *info = {pin->start, pin->len, PAGE, 0u, 0u, pin->mapped != nullptr, !cached, cached ? 2 : 1};
  return 0;
}
EXPORT int gdr_map(void *driver, Handle handle, void **va, size_t len) {
  const int failed = begin("gdr_map");
  if (failed != 0) return failed;
  Pin *pin = pin_of(static_cast<Driver *>(driver), handle);
  if (pin == nullptr || len > pin->len) return EINVAL;
  if (pin->mapped != nullptr) return EAGAIN;
  size_t offset = 0;
  const int fd = change(*pin, 0, &offset);
  void *at = mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (at == MAP_FAILED) return errno;
  *va = pin->mapped = at;
  return 0;
}
EXPORT int gdr_unmap(void *driver, Handle handle, void *va, size_t len) {
  const int failed = begin("gdr_unmap");
  if (failed != 0) return failed;
  Pin *pin = pin_of(static_cast<Driver *>(driver), handle);
  if (pin == nullptr || pin->mapped != va || va == nullptr) return EINVAL;
  // The address range stays reserved: a late access is detected.
  mmap(va, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  pin->mapped = nullptr;
  return 0;
}
