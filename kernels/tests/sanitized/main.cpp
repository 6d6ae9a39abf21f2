// The host build of the I/O kernel under a sanitizer: two kernel threads with two queues each, a
// controller thread for each device, and a caller who fills IOCBs, reads completions, and checks
// every byte. All of it shares plain memory, so ThreadSanitizer reports each missing release or
// acquire. Every array is an allocation of its own, so AddressSanitizer reports each access behind
// its end.
#define GIO_HOST 1
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include <thread>
#include <vector>

#include "gio/engine.cuh"

namespace {

const uint32_t DEVICES = 2, PARTS = 2, WARPS = DEVICES * PARTS;
const uint32_t DEPTH_LOG2 = 4, DEPTH = 1u << DEPTH_LOG2, MASK = DEPTH - 1;
const uint32_t AREA = 256, LBA_SHIFT = 9, LBA_BYTES = 1u << LBA_SHIFT;
const uint32_t RING = 8, IOCTXS = 48, ROWS = 2, FILES = 64;
const uint64_t DATA_LBA = 3;
const uint32_t ERROR_EVERY = 61; // LBAs that the controllers refuse to read

// N of T, in an allocation of their own.
template <class T, size_t N> struct Array : std::vector<T> {
  Array() : std::vector<T>(N) {}
};

uint64_t address(const void *p) { return reinterpret_cast<uint64_t>(p); }
template <class T> uint64_t address(const std::vector<T> &array) { return address(array.data()); }

void check(bool right, const char *what) {
  if (right) return;
  fprintf(stderr, "wrong: %s\n", what);
  abort();
}

// A queue pair and the controller's end of it.
struct Queue {
  Array<uint64_t, DEPTH * 8> sq;
  Array<uint32_t, DEPTH * 4> cq;
  Array<uint64_t, DEPTH * AREA / 8> descriptors;
  Array<uint32_t, 2> doorbell;
  Array<gio_slot, DEPTH> slots;
  Array<uint16_t, DEPTH> free_slots;
  uint32_t head = 0, tail = 0, qid = 0, device = 0;
  std::vector<std::vector<uint64_t>> pending;
};

uint64_t content(uint32_t device, uint64_t lba) {
  return (lba * DEVICES + device) * 0x9e3779b97f4a7c15u;
}

// Moves the first 8 bytes of each LBA: enough to see a race on any of them.
void move(Queue &q, const std::vector<uint64_t> &sqe) {
  uint64_t lba = sqe[5];
  const bool read = (sqe[0] & 0xff) == GIO_OP_READ;
  auto block = [&](uint64_t iova, uint64_t bytes) {
    for (; bytes != 0; bytes -= LBA_BYTES, iova += LBA_BYTES, ++lba) {
      uint64_t *word = reinterpret_cast<uint64_t *>(iova);
      if (read)
        *word = content(q.device, lba);
      else
        check(*word == content(q.device, lba), "what the controller found to write");
    }
  };
  if (sqe[4] >> 60 != 3) {
    block(sqe[3], sqe[4] & 0xffffffff);
    return;
  }
  const uint64_t *entry = reinterpret_cast<const uint64_t *>(sqe[3]);
  for (uint64_t i = 0; i < (sqe[4] & 0xffffffff) / 16; ++i) {
    block(entry[2 * i], entry[2 * i + 1] & 0xffffffff);
  }
}

bool controller_step(Queue &q, uint32_t &dice) {
  const uint32_t tail = gio_ld_acquire_sys(&q.doorbell[0]);
  bool moved = false;
  for (; q.head != tail; q.head = (q.head + 1) & MASK, moved = true) {
    const uint64_t *sqe = q.sq.data() + q.head * 8;
    q.pending.emplace_back(sqe, sqe + 8);
  }
  while (!q.pending.empty() && ((q.tail + 1) & MASK) != gio_ld_acquire_sys(&q.doorbell[1])) {
    dice = dice * 1664525 + 1013904223;
    const size_t at = (dice >> 8) % q.pending.size();
    const std::vector<uint64_t> sqe = q.pending[at];
    q.pending[at] = q.pending.back();
    q.pending.pop_back();
    const bool refused = (sqe[0] & 0xff) == GIO_OP_READ && sqe[5] % ERROR_EVERY == 0;
    if (!refused) move(q, sqe);
    uint32_t *cqe = q.cq.data() + (q.tail & MASK) * 4;
    const uint32_t phase = (q.tail >> DEPTH_LOG2 & 1) ^ 1;
    cqe[2] = q.head | q.qid << 16; // plain, as DMA is: the kernel has no business there before
    const uint32_t cid = static_cast<uint32_t>(sqe[0] >> 16) & 0xffff;
    gio_st_release_sys(cqe + 3, cid | phase << 16 | (refused ? 0x281u << 17 : 0u));
    q.tail += 1;
    moved = true;
    if (dice >> 30 == 0) break;
  }
  return moved;
}

// The relay, and what follows it.
struct Relay {
  gio_relay relay;
  gio_iocb iocbs[RING];
  uint64_t ring[RING];
};

struct Ring {
  Relay relay = {};
  Array<gio_warp, WARPS> warps;
  Array<gio_iocb, RING> iocbs;
  Array<gio_progress, RING> progress;
  Array<uint64_t, RING> sq;
  Array<uint64_t, RING> cq;
  uint64_t stop = 0;
  uint32_t cq_tail = 0, event = 0;
  gio_args args = {};
};

void lay_out(Ring &ring, Queue *queues, bool relayed) {
  for (uint32_t i = 0; i < WARPS; ++i) {
    Queue &q = queues[i];
    gio_warp &w = ring.warps[i];
    q.qid = i + 1;
    q.device = i / PARTS;
    w.sq = address(q.sq), w.cq = address(q.cq);
    w.sq_doorbell = address(&q.doorbell[0]), w.cq_doorbell = address(&q.doorbell[1]);
    w.descriptors = w.descriptors_iova = address(q.descriptors);
    w.slots = address(q.slots), w.free_slots = address(q.free_slots);
    w.descriptor_bytes = AREA, w.depth_log2 = DEPTH_LOG2, w.nsid = 1;
    w.lba_shift = LBA_SHIFT, w.lbas = 1 << 20, w.transfer_bytes_max = 8 * LBA_BYTES;
    w.qid = q.qid, w.device = q.device, w.part = i % PARTS, w.parts = PARTS;
    w.free_count = DEPTH - 1, w.cursor_active = GIO_WINDOW;
    for (uint32_t s = 0; s < DEPTH - 1; ++s) q.free_slots[s] = static_cast<uint16_t>(s);
  }
  gio_args &a = ring.args;
  for (gio_progress &progress : ring.progress) progress.warps_left = WARPS;
  a.warps = address(ring.warps), a.iocbs = address(ring.iocbs), a.sq_ring = address(ring.sq);
  a.progress = address(ring.progress);
  a.cq_ring = address(ring.cq), a.cq_tail = address(&ring.cq_tail), a.stop = address(&ring.stop);
  a.timeout_ns = 60000000000u, a.warp_count = WARPS, a.ring_mask = RING - 1;
  a.rounds = 8;
  if (relayed) a.relay = address(&ring.relay.relay);
}

// One IOCB's memory: the KV pool of its own, the map, the statuses.
struct Op {
  Array<uint64_t, ROWS * IOCTXS * LBA_BYTES / 8> memory;
  Array<gio_affine, IOCTXS> map;
  Array<uint32_t, DEVICES + 1> starts;
  Array<uint32_t, IOCTXS> status;
  Array<uint32_t, ROWS * IOCTXS> checksums;
  Array<uint64_t, ROWS> row_iova;
  Array<uint64_t, DEVICES> data_lba;
  Array<gio_pool, 1> pool;
  uint64_t *object(uint32_t row, uint32_t block) {
    return memory.data() + (row * IOCTXS + block) * LBA_BYTES / 8;
  }
};

void place(uint32_t file, uint32_t row, uint32_t &device, uint64_t &lba) {
  const uint32_t group = 8, g = file / group, k = file % group;
  device = (k + row) % DEVICES;
  lba = DATA_LBA + (g * ROWS + row) * (group / DEVICES) + k / DEVICES;
}

// Of an object that begins with `word`.
uint32_t checksum(uint64_t word) {
  uint64_t object[LBA_BYTES / 8] = {word};
  return gio_crc_by_table(reinterpret_cast<const uint8_t *>(object), LBA_BYTES);
}

void fill(Ring &ring, Op &op, uint32_t id, uint32_t turn) {
  gio_iocb &b = ring.iocbs[id];
  b = {};
  uint32_t n = 0;
  for (uint32_t c = 0; c < DEVICES; ++c) {
    op.starts[c] = n;
    for (uint32_t f = c; f < FILES && n < (c + 1) * IOCTXS / DEVICES; f += DEVICES) {
      op.map[n] = gio_affine{IOCTXS - 1 - n, f};
      ++n;
    }
  }
  op.starts[DEVICES] = n;
  b.opcode = turn % 2 == 0 ? GIO_OP_READ : GIO_OP_WRITE;
  for (uint32_t i = 0; i < n; ++i) {
    op.status[i] = 0;
    for (uint32_t r = 0; r < ROWS; ++r) {
      uint32_t device;
      uint64_t lba;
      place(op.map[i].file, r, device, lba);
      const bool write = b.opcode == GIO_OP_WRITE;
      *op.object(r, op.map[i].block) = write ? content(device, lba) : turn;
      op.checksums[r * n + i] = write ? 0 : checksum(content(device, lba));
    }
  }
  for (uint32_t r = 0; r < ROWS; ++r) op.row_iova[r] = address(op.object(r, 0));
  for (uint64_t &lba : op.data_lba) lba = DATA_LBA;
  op.pool[0] = {address(op.row_iova),
                address(op.data_lba),
                LBA_BYTES,
                IOCTXS,
                FILES,
                ROWS,
                DEVICES,
                8,
                LBA_BYTES,
                LBA_BYTES,
                4 * LBA_BYTES,
                0,
                0,
                address(op.row_iova)};
  b.kind = GIO_KIND_AFFINE, b.count = n, b.ioctx = address(op.map);
  b.starts = address(op.starts), b.status = address(op.status), b.pool = address(op.pool);
  b.row_count = ROWS, b.devices = DEVICES, b.checksums = address(op.checksums);
  b.wait = address(&ring.event), b.wait_value = turn / 3;
}

void verify(Ring &ring, Op &op, uint32_t id, uint32_t turn) {
  const gio_iocb &b = ring.iocbs[id];
  uint32_t refused = 0;
  for (uint32_t i = 0; i < b.count; ++i) {
    for (uint32_t r = 0; r < ROWS; ++r) {
      uint32_t device;
      uint64_t lba;
      place(op.map[i].file, r, device, lba);
      const uint32_t stored = op.checksums[r * b.count + i];
      check(stored == checksum(content(device, lba)), "the checksum");
      if (b.opcode == GIO_OP_WRITE) continue;
      const uint64_t word = *op.object(r, op.map[i].block);
      if (op.status[i] == 0) check(word == content(device, lba), "what was read");
      refused += word == turn ? 1u : 0u;
    }
    check(op.status[i] == 0 || op.status[i] == (GIO_STATUS_NVME | 0x281u), "status");
  }
  check(b.objects + refused == b.count * ROWS, "objects");
  check((b.errors == 0) == (refused == 0), "errors");
}

} // namespace

int main(int argc, char **argv) {
  const uint32_t turns = argc > 1 ? static_cast<uint32_t>(atoi(argv[1])) : 300;
  static Queue queues[WARPS];
  static Ring ring;
  static Op ops[RING];
  lay_out(ring, queues, argc > 2);
  std::vector<std::thread> kernels, controllers;
  static uint32_t quit = 0;
  for (uint32_t t = 0; t < 2; ++t) {
    kernels.emplace_back([t] {
      uint32_t result = 0;
      while ((result & GIO_RUN_FINISHED) == 0) {
        result = gio_host_run(&ring.args, t * 2, 2);
        if ((result & GIO_RUN_MOVED) == 0) sched_yield();
      }
    });
  }
  for (uint32_t d = 0; d < DEVICES; ++d) {
    controllers.emplace_back([d] {
      uint32_t dice = d + 1;
      while (gio_ld_acquire_sys(&quit) == 0) {
        bool moved = false;
        for (uint32_t p = 0; p < PARTS; ++p) {
          moved = controller_step(queues[d * PARTS + p], dice) || moved;
        }
        if (!moved) sched_yield();
      }
    });
  }
  uint32_t issued = 0, seen = 0, turn_of[RING] = {};
  std::vector<uint32_t> unused;
  for (uint32_t i = 0; i < RING; ++i) unused.push_back(i);
  while (seen < turns) {
    if (issued < turns && !unused.empty()) {
      const uint32_t id = unused.back();
      unused.pop_back();
      turn_of[id] = issued;
      fill(ring, ops[id], id, issued);
      gio_st_release_sys(&ring.sq[issued % RING], static_cast<uint64_t>(issued + 1) << 32 | id);
      issued += 1;
    }
    // Operations wait in threes for the one before; counters are read while the kernel runs.
    gio_st_release_sys(&ring.event, seen / 3 + 1);
    check(gio_ld_relaxed_sys(&ring.warps[0].fault) == 0, "no fault");
    (void)gio_ld_relaxed_sys(&ring.warps[0].commands);
    const uint64_t entry = gio_ld_acquire_sys(&ring.cq[seen % RING]);
    if (entry >> 32 != seen + 1) {
      sched_yield();
      continue;
    }
    const uint32_t id = static_cast<uint32_t>(entry);
    verify(ring, ops[id], id, turn_of[id]);
    unused.push_back(id);
    seen += 1;
  }
  gio_st_release_sys(&ring.stop, uint64_t{1});
  for (std::thread &t : kernels) t.join();
  gio_st_release_sys(&quit, 1u);
  for (std::thread &t : controllers) t.join();
  uint64_t commands = 0;
  for (const gio_warp &w : ring.warps) commands += w.commands;
  printf("%u operations, %llu commands, no wrong byte\n", seen,
         static_cast<unsigned long long>(commands));
}
