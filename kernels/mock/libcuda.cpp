// A libcuda without a GPU: the functions that gio-kernels uses, over memory of this process. A
// stream is a thread, and a launch runs the I/O kernel compiled for the host.
//
// It is stricter than a driver. Pinned memory is mapped twice, so that a host address passed to the
// kernel is detected; GPU memory is inaccessible to the process while no kernel runs, so that the
// host cannot use a GPU address either; both are aligned to only 512 bytes; a call fails without a
// current context, or if a stream capture in another thread would forbid it; asynchronous copies
// are delayed, those of pageable memory until the next copy back; and memory freed while a kernel
// runs, or allocations and compilations beside the I/O kernel, are counted.
//
// MOCK_LEVEL: 13 everything; 129 with batched copies as in CUDA 12.9; 12 without them and without
// green contexts; 11 also without the stream operations' new names, like an old driver.
//
// MOCK_CUDA_INJECT=call:skip:code fails a call; MOCK_COPY_DELAY_US is the delay of copies.
#define GIO_HOST 1
#include "gio/engine.cuh"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef int Result;
typedef unsigned long long DevicePtr;

static const Result OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201,
                    PEER_UNSUPPORTED = 217, INVALID_PTX = 218, INVALID_HANDLE = 400,
                    NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
                    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
                    NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900;
static const unsigned SMS = 132;

struct Injection {
  std::string call;
  long skip;
  Result code;
};
struct HostBlock {
  char *base;
  DevicePtr device;
  size_t len;
  unsigned flags;
  bool registered;
};
// Memory of the GPU. Kernels access it at `view`; copies, words and libgdrapi use `alias` or `fd`.
struct Memory {
  size_t len; // requested length
  char *view;
  char *alias;
  size_t whole; // mapped length
  int fd;
  int pins; // pin count of libgdrapi
  unsigned sync; // SYNC_MEMOPS
  bool vmm;      // of cuMemCreate
  bool rdma;     // gpuDirectRDMACapable
  int device = 0;  // ordinal
  int opened = 0;  // of another process: how often it was opened and not closed
};
struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool busy = false;
  bool ended = false;
};

// Never destroyed: threads may outlive main.
struct Mock {
  std::mutex mutex;
  std::vector<Injection> injections;
  std::map<std::string, long> counts;
  std::map<void *, HostBlock> blocks;
  std::map<DevicePtr, Memory> memory;
  std::vector<std::pair<DevicePtr, std::string>> pending; // copied from the host, not yet arrived
  int awake = 0; // kernels with access to the GPU's memory
  std::atomic<Result> lost{OK};
  std::atomic<bool> hang{false};
  std::atomic<bool> hold{false}; // copies are suspended
  std::atomic<unsigned> context_flags{8}; // MAP_HOST, as in a driver
  std::atomic<int> delay_us{50};
  std::atomic<int> running{0};
  std::atomic<int> io_kernels{0}; // running I/O kernels: they may wait for the host
  std::atomic<long> live{0};
};
static Mock &mock() {
  static Mock *m = [] {
    Mock *made = new Mock;
    const char *delay = getenv("MOCK_COPY_DELAY_US");
    if (delay != nullptr) made->delay_us = atoi(delay);
    const char *text = getenv("MOCK_CUDA_INJECT"); // call:skip:code
    if (text != nullptr) {
      const std::string all(text);
      const size_t a = all.find(':'), b = all.rfind(':');
      made->injections.push_back(
          {all.substr(0, a), atol(all.c_str() + a + 1), atoi(all.c_str() + b + 1)});
    }
    return made;
  }();
  return *m;
}
static thread_local std::vector<void *> contexts;
static thread_local unsigned capture_mode = 0;
static char context_handles[8];

// Returns the ordinal of a context's device.
static int ordinal_of(const void *context) {
  for (int i = 0; i < 8; ++i) {
    if (context == &context_handles[i]) return i;
  }
  return -1;
}
static bool sticks(Result code) {
  return code == 700 || code == 702 || code == 710 || (code >= 714 && code <= 719);
}

// Called at the beginning of every call: returns an injected error, or the sticky one.
static Result begin(const char *call, bool needs_context) {
  Mock &m = mock();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.counts[call] += 1;
  if (m.lost != OK) return m.lost;
  for (Injection &i : m.injections) {
    if (i.call != call || i.skip-- != 0) continue;
    if (sticks(i.code)) m.lost = i.code;
    return i.code;
  }
  if (needs_context && contexts.empty()) return INVALID_CONTEXT;
  if (needs_context && capture_mode != 2u) return CAPTURE_UNSUPPORTED; // another thread captures
  return OK;
}
#define BEGIN(call)                                                                                \
  if (const Result failed = begin(#call, true)) return failed
#define BEGIN_ANYWHERE(call)                                                                       \
  if (const Result failed = begin(#call, false)) return failed

static void freeing() {
  Mock &m = mock();
  m.live -= 1;
  if (m.running != 0) {
    std::lock_guard<std::mutex> lock(m.mutex);
    m.counts["freed while a kernel ran"] += 1;
  }
}

// Counts operations that a driver may only perform when no kernel runs.
static void making() {
  Mock &m = mock();
  if (m.io_kernels == 0) return;
  std::lock_guard<std::mutex> lock(m.mutex);
  m.counts["made beside the I/O kernel"] += 1;
}

// Returns true if the GPU may access `len` bytes at `address`.
static bool mapped(uint64_t address, size_t len) {
  Mock &m = mock();
  std::lock_guard<std::mutex> lock(m.mutex);
  for (const auto &entry : m.blocks) {
    const HostBlock &b = entry.second;
    if (address >= b.device && address + len <= b.device + b.len) return true;
  }
  for (const auto &entry : m.memory) {
    if (address >= entry.first && address + len <= entry.first + entry.second.len) return true;
  }
  return false;
}

// Returns the GPU memory that contains `len` bytes at `address`. The lock is held.
static Memory *memory_at(uint64_t address, size_t len) {
  auto at = mock().memory.upper_bound(address);
  if (at == mock().memory.begin()) return nullptr;
  --at;
  return address + len <= at->first + at->second.len ? &at->second : nullptr;
}
// Returns the mock's own pointer to GPU address `address`, or null.
static char *reach(uint64_t address, size_t len) {
  if (!mapped(address, len)) return nullptr;
  std::lock_guard<std::mutex> lock(mock().mutex);
  const Memory *m = memory_at(address, len);
  char *const plain = reinterpret_cast<char *>(address);
  return m == nullptr ? plain : m->alias + (plain - m->view);
}
// While an instance lives, the process has access to the GPU's memory: for kernels.
struct Awake {
  Awake() {
    std::lock_guard<std::mutex> lock(mock().mutex);
    if (mock().awake++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  ~Awake() {
    std::lock_guard<std::mutex> lock(mock().mutex);
    if (--mock().awake == 0) protect(PROT_NONE);
  }
  static void protect(int access) {
    for (const auto &e : mock().memory) mprotect(e.second.view, e.second.whole, access);
  }
};

// Functions for tests.
EXPORT void mock_inject(const char *call, long skip, Result code) {
  std::lock_guard<std::mutex> lock(mock().mutex);
  mock().injections.push_back({call, skip, code});
}
EXPORT long mock_count(const char *what) {
  std::lock_guard<std::mutex> lock(mock().mutex);
  return mock().counts[what];
}
EXPORT long mock_live() { return mock().live; }
EXPORT void mock_hang(int hang) { mock().hang = hang != 0; }
EXPORT void mock_hold_copies(int hold) { mock().hold = hold != 0; }
EXPORT void mock_lose(Result code) { mock().lost = code; }
EXPORT int mock_reachable(const void *address) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const bool read = write(ends[1], address, 1) == 1; // fails if a read would crash this process
  close(ends[0]);
  close(ends[1]);
  return read ? 1 : 0;
}
// Returns the flags that the page at this address was registered with; 0 if it was not.
EXPORT unsigned mock_registered(void *host) {
  std::lock_guard<std::mutex> lock(mock().mutex);
  const auto at = mock().blocks.find(host);
  return at != mock().blocks.end() && at->second.registered ? at->second.flags : 0u;
}

// Driver and device.
EXPORT Result cuInit(unsigned) {
  BEGIN_ANYWHERE(cuInit);
  return OK;
}
EXPORT Result cuDriverGetVersion(int *version) {
  *version = MOCK_LEVEL == 129 ? 12090 : MOCK_LEVEL * 1000 + (MOCK_LEVEL == 11 ? 40 : 0);
  return OK;
}
EXPORT Result cuGetErrorName(Result code, const char **text) {
  static const std::map<Result, const char *> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {218, "CUDA_ERROR_INVALID_PTX"},    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {702, "CUDA_ERROR_LAUNCH_TIMEOUT"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
  };
  const auto at = names.find(code);
  if (at == names.end()) return INVALID_VALUE;
  *text = at->second;
  return OK;
}
EXPORT Result cuGetErrorString(Result, const char **text) {
  *text = "in the mock's words";
  return OK;
}
EXPORT Result cuDeviceGetCount(int *count) {
  BEGIN_ANYWHERE(cuDeviceGetCount);
  *count = getenv("MOCK_CUDA_DEVICES") != nullptr ? atoi(getenv("MOCK_CUDA_DEVICES")) : 1;
  return OK;
}
EXPORT Result cuDeviceGet(int *device, int ordinal) {
  BEGIN_ANYWHERE(cuDeviceGet);
  *device = ordinal + 7; // a handle differs from an ordinal
  return OK;
}
EXPORT Result cuDeviceGetName(char *name, int len, int device) {
  BEGIN_ANYWHERE(cuDeviceGetName);
  if (device < 7) return INVALID_VALUE;
  strncpy(name, "Mock GPU", static_cast<size_t>(len));
  return OK;
}
// MOCK_CUDA_ATTRIBUTE=98:1 overrides one attribute of the GPU with a value.
static int other_attribute(int attribute, int value) {
  const char *text = getenv("MOCK_CUDA_ATTRIBUTE");
  if (text == nullptr || atoi(text) != attribute) return value;
  return atoi(strchr(text, ':') + 1);
}
EXPORT Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  BEGIN_ANYWHERE(cuDeviceGetAttribute);
  static const std::map<int, int> values = {{16, static_cast<int>(SMS)}, {33, 0x65}, {34, 0},
                                            {50, 0},  {75, 9}, {76, 0}, {98, 0},
                                            {99, 1},  {100, 0}, {118, 100}};
  const auto at = values.find(attribute);
  if (at == values.end()) return INVALID_VALUE;
  *value = other_attribute(attribute, at->second);
  if (attribute == 33) *value += device - 7; // PCI_BUS_ID
  return OK;
}
EXPORT Result cuDevicePrimaryCtxRetain(void **context, int device) {
  BEGIN_ANYWHERE(cuDevicePrimaryCtxRetain);
  if (device < 7 || device >= 7 + 8) return INVALID_VALUE;
  mock().live += 1;
  *context = &context_handles[device - 7];
  return OK;
}
EXPORT Result cuDevicePrimaryCtxRelease_v2(int) {
  BEGIN_ANYWHERE(cuDevicePrimaryCtxRelease);
  freeing();
  return OK;
}
EXPORT Result cuCtxPushCurrent_v2(void *context) {
  BEGIN_ANYWHERE(cuCtxPushCurrent);
  if (ordinal_of(context) < 0) return INVALID_CONTEXT;
  contexts.push_back(context);
  return OK;
}
EXPORT Result cuCtxPopCurrent_v2(void **context) {
  if (contexts.empty()) return INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return OK;
}
EXPORT Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  BEGIN(cuCtxGetStreamPriorityRange);
  *least = 0;
  *greatest = -5;
  return OK;
}
EXPORT Result cuThreadExchangeStreamCaptureMode(unsigned *mode) {
  std::swap(*mode, capture_mode);
  return OK;
}
// Returns the state of this thread: contexts and capture mode.
EXPORT unsigned mock_thread() { return static_cast<unsigned>(contexts.size()) * 16 + capture_mode; }

// Memory.
EXPORT Result cuMemHostAlloc(void **host, size_t len, unsigned flags) {
  BEGIN(cuMemHostAlloc);
  making();
  if (flags != 3u) return INVALID_VALUE; // PORTABLE | DEVICEMAP
  const size_t odd = 512;
  const size_t whole = (len + odd + 4095) & ~size_t{4095};
  const int fd = memfd_create("mock-pinned", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(whole)) != 0) return OUT_OF_MEMORY;
  void *views[2];
  for (void *&view : views) {
    view = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (view == MAP_FAILED) return OUT_OF_MEMORY;
  }
  close(fd);
  memset(views[0], 0xA5, std::min(whole, size_t{16} << 20)); // contents are undefined
  char *base = static_cast<char *>(views[0]) + odd;
  const DevicePtr device = reinterpret_cast<DevicePtr>(views[1]) + odd;
  Mock &m = mock();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.blocks[base] = {base, device, len, flags, false};
  m.live += 1;
  *host = base;
  return OK;
}
EXPORT Result cuMemFreeHost(void *host) {
  BEGIN(cuMemFreeHost);
  {
    Mock &m = mock();
    std::lock_guard<std::mutex> lock(m.mutex);
    if (m.blocks.erase(host) != 1u) return INVALID_VALUE; // pages stay: detects late accesses
  }
  freeing();
  return OK;
}
EXPORT Result cuMemHostRegister_v2(void *host, size_t len, unsigned flags) {
  BEGIN(cuMemHostRegister);
  if (reinterpret_cast<uint64_t>(host) % 4096 != 0 || len % 4096 != 0) return INVALID_VALUE;
  Mock &m = mock();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.blocks.count(host) != 0u) return ALREADY_REGISTERED;
  // Shared pages can be mapped again; private ones keep their address.
  void *alias = mremap(host, 0, len, MREMAP_MAYMOVE);
  const DevicePtr device = reinterpret_cast<DevicePtr>(alias == MAP_FAILED ? host : alias);
  m.blocks[host] = {static_cast<char *>(host), device, len, flags, true};
  m.live += 1;
  return OK;
}
EXPORT Result cuMemHostUnregister(void *host) {
  BEGIN(cuMemHostUnregister);
  {
    Mock &m = mock();
    std::lock_guard<std::mutex> lock(m.mutex);
    const auto at = m.blocks.find(host);
    if (at == m.blocks.end() || !at->second.registered) return NOT_REGISTERED;
    m.blocks.erase(at);
  }
  freeing();
  return OK;
}
EXPORT Result cuMemHostGetDevicePointer_v2(DevicePtr *device, void *host, unsigned flags) {
  BEGIN(cuMemHostGetDevicePointer);
  Mock &m = mock();
  std::lock_guard<std::mutex> lock(m.mutex);
  const auto at = m.blocks.find(host);
  if (at == m.blocks.end() || flags != 0u) return INVALID_VALUE;
  *device = at->second.device;
  return OK;
}
#include "memory.inc"
#include "vmm.inc"
#include "ipc.inc"
#include "streams.inc"
#include "launch.inc"
#include "copies.inc"
