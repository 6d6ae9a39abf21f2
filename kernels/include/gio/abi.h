// The binary interface between host code and the I/O kernel: plain C, for nvcc, NVRTC, g++.
//
// `cargo xtask abi` generates gio-uring/src/abi/generated.rs from it. Every address is one that the
// executor running the kernel can dereference, unless its name ends in _iova. Little-endian.
#ifndef GIO_ABI_H
#define GIO_ABI_H

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#define GIO_WARP 32u        // lanes of a warp; SQEs per doorbell at the most
#define GIO_IOCTX_MAX 2048u // explicit IOCTXs in one IOCB (paper, section 3.2)
#define GIO_WINDOW 8u       // operations one warp may have in progress
#define GIO_PLACEMENTS 8u   // placement handles of a namespace that can be named

// gio_iocb.opcode: the NVMe opcodes.
#define GIO_OP_WRITE 1u
#define GIO_OP_READ 2u
// gio_iocb.flags
#define GIO_FLAG_FUA 1u // writes reach non-volatile media before they complete
// gio_iocb.kind
#define GIO_KIND_EXPLICIT 0u // ioctx points to gio_ioctx
#define GIO_KIND_AFFINE 1u   // ioctx points to gio_affine; addresses follow from the pool

// Per-IOCTX status and gio_iocb.error: kind << 24 | NVMe status (15 bits, without phase).
#define GIO_STATUS_OK 0u
#define GIO_STATUS_NVME (1u << 24)      // the controller said so
#define GIO_STATUS_TIMEOUT (2u << 24)   // no completion in time: the device may still do DMA
#define GIO_STATUS_CANCELLED (3u << 24) // never given to the device: the kernel was stopped
#define GIO_STATUS_FAULT (4u << 24)     // the queue failed first; the device may still do DMA
#define GIO_STATUS_INVALID (5u << 24)   // never given to the device: block, file or range is wrong
#define GIO_STATUS_CHECKSUM (6u << 24)  // read, but not what its checksum was made of

// gio_warp.fault
#define GIO_FAULT_NONE 0u
#define GIO_FAULT_CID 1u     // a completion for a CID that is not outstanding (or an old one)
#define GIO_FAULT_SQHD 2u    // a completion whose SQ head is outside the queue
#define GIO_FAULT_SQID 3u    // a completion that names another queue
#define GIO_FAULT_TIMEOUT 4u // a command exceeded the timeout
#define GIO_FAULT_EVENT 5u   // an operation waited for its event for too long

// gio_relay.stop; 0: go on
#define GIO_STOP_SEEN 1u    // the host's word says stop
#define GIO_STOP_DRAINED 2u // ... and all ring entries are copied

// gio_warp.descriptor_mode
#define GIO_DESC_SGL 0u
#define GIO_DESC_PRP 1u

// clang-format off

// An explicit I/O context: one run of bytes on one device.
typedef struct gio_ioctx {
  uint64_t iova;   // first byte for the controller
  uint64_t lba;    // first LBA on the device
  uint32_t bytes;  // length, a multiple of the LBA size
  uint32_t device; // index of the device
} gio_ioctx;       // 24 bytes

// An affine I/O context: the kernel computes IOVA and LBA (ADR 0002).
typedef struct gio_affine {
  uint32_t block; // KV block in the registered pool
  uint32_t file;  // GPU file in the store
} gio_affine;     // 8 bytes

// A registered KV pool and the layout of its files. Read-only for the kernel.
//   object (f, r): g = f / group, k = f % group, device = (k + r) % devices,
//   slot = (g * rows + r) * (group / devices) + k / devices,
//   lba = data_lba[device] + slot * (slot_bytes >> lba_shift),
//   iova = row_iova[r] + block * block_stride
typedef struct gio_pool {
  uint64_t row_iova;     // u64[rows]: IOVA of block 0's object of each row
  uint64_t data_lba;     // u64[devices]: first LBA of the data region
  uint64_t block_stride; // bytes from one block's object to the next one's
  uint32_t blocks;       // KV blocks registered
  uint32_t files;        // GPU files in the store
  uint32_t rows;         // layers * segments
  uint32_t devices;      // N
  uint32_t group;        // G, a multiple of N
  uint32_t object_bytes; // bytes of one object in memory
  uint32_t slot_bytes;   // bytes of one object on the device: object_bytes padded to the LBA size
  uint32_t run_bytes;    // commands are merged up to this many bytes
  uint64_t pad_read_iova;  // slot_bytes - object_bytes of a read go here (no bit bucket)
  uint64_t pad_write_iova; // ... and come from here (zeroes) in a write
  uint64_t row_base;     // u64[rows]: block 0's object of each row for the kernel; 0 = out of reach
} gio_pool;              // 80 bytes

// One operation. Filled by the caller. The last warp writes errors, error and objects.
typedef struct gio_iocb {
  uint32_t opcode;
  uint32_t flags;
  uint32_t kind;
  uint32_t count;     // IOCTXs
  uint64_t ioctx;     // gio_ioctx[count] or gio_affine[count], grouped by device class
  uint64_t starts;    // u32[devices + 1]: IOCTXs of class c are [starts[c], starts[c + 1])
                      //   class = device (explicit) or file % devices (affine)
  uint64_t status;    // u32[count]: written only for what failed; sticky
  uint64_t pool;      // gio_pool, affine only
  uint32_t row_first; // affine: rows [row_first, row_first + row_count) of every IOCTX
  uint32_t row_count;
  uint32_t bytes_max; // explicit: the longest IOCTX
  uint32_t devices;   // entries of starts, less one
  uint64_t wait;      // u32: start only when *wait - wait_value >= 0 (signed); 0 = at once
  uint64_t signal;    // u32: *signal = signal_value when everything completed; 0 = none
  uint32_t wait_value;
  uint32_t signal_value;
  uint32_t errors;    // commands and IOCTXs that failed
  uint32_t placement; // writes: 1 + index of a placement handle, on devices that have it; 0 = none
  uint64_t error;     // one of the failures: status << 32 | index of its IOCTX
  uint64_t objects;   // IOCTX rows done without error
  uint64_t checksums; // affine: u32[pool rows * count], row * count + IOCTX: CRC-32C of each object
                      //   in memory, without padding. A write stores them, a read compares with
                      //   them: GIO_STATUS_CHECKSUM. 0 = none. Needs gio_pool.row_base
  uint64_t reserved;
} gio_iocb;           // 128 bytes

// Progress of one operation over all warps. In memory near the kernel, one for each IOCB. The last
// warp writes the sums to the IOCB and resets this for the next operation.
typedef struct gio_progress {
  uint32_t warps_left; // warps that have not finished their part
  uint32_t errors;
  uint64_t error;
  uint64_t objects;
  uint64_t reserved;
} gio_progress;        // 32 bytes

// One command slot of a queue: what its CID stands for.
typedef struct gio_slot {
  uint16_t generation; // of the CID: cid = generation << depth_log2 | slot
  uint16_t state;      // 0 free, 1 outstanding, 2 given up (quarantined: DMA may still happen)
  uint8_t active;      // index into gio_warp.active
  uint8_t count;       // IOCTXs merged into the command; bit 7: a split of one, not its last
  uint16_t row;        // affine: of the pool
  uint32_t first;      // index of the first IOCTX
  uint32_t bytes;
  uint64_t since_ns;   // when it was submitted
} gio_slot;            // 24 bytes

// An operation in progress on one warp.
typedef struct gio_active {
  uint32_t iocb;        // id
  uint32_t outstanding; // commands of it on this queue
  uint32_t state;       // 0 unused, 1 generating, 2 all generated
  uint32_t errors;
  uint64_t error;
  uint64_t objects;
  uint64_t status;      // gio_iocb.status
  uint32_t opcode;      // gio_iocb.opcode
  uint32_t splits;      // gio_op.splits
  uint64_t checksums;   // gio_iocb.checksums. The rest is for them:
  uint64_t ioctx;       // of gio_iocb
  uint64_t row_base;    // of gio_pool
  uint64_t block_stride;
  uint32_t object_bytes;
  uint32_t count;       // of gio_iocb
} gio_active;           // 88 bytes

// The operation that a warp generates commands for: copied from IOCB, pool and tables when the warp
// took it, so that a doorbell needs none of them again. The same for all lanes.
typedef struct gio_op {
  gio_iocb iocb;
  gio_pool pool;          // affine only
  uint64_t lbas;          // size of the namespace
  uint64_t data_lba;      // of this device
  uint64_t row_iova;      // of `row`
  uint64_t pad_iova;
  uint32_t pad_type;      // SGL: data or bit bucket
  uint32_t affine;
  uint32_t invalid;       // GIO_STATUS_INVALID: makes no sense as a whole; else 0
  uint32_t rows;
  uint32_t row;           // affine: of the pool
  uint32_t row_class;
  uint32_t begin;         // IOCTXs [begin, end) are this warp's share of the row
  uint32_t end;
  uint32_t split_bytes;   // of one command, at the most
  uint32_t splits;        // commands of one IOCTX, at the most
  uint32_t merge;         // IOCTXs of one command, at the most
  uint32_t boundary_lbas; // no command should cross a multiple of it; 0 = none
  uint32_t slot_lbas;
  uint32_t group_slots;   // slots of one row of a group on one device
  uint32_t prp;
  uint32_t page_bytes;
  uint32_t lba_shift;
  uint32_t reserved;
} gio_op;                 // 312 bytes

// One warp and the queue pair it owns. The first half is written by the host before the start, the
// rest only by the warp; the host reads counters and fault at any time.
typedef struct gio_warp {
  uint64_t sq;               // 64-byte entries
  uint64_t cq;               // 16-byte entries
  uint64_t sq_doorbell;
  uint64_t cq_doorbell;
  uint64_t descriptors;      // one area per slot
  uint64_t descriptors_iova;
  uint64_t slots;            // gio_slot[depth]
  uint64_t free_slots;       // u16[depth]: stack of free slots
  uint32_t descriptor_bytes;
  uint32_t depth_log2;
  uint32_t nsid;
  uint32_t lba_shift;
  uint64_t lbas;             // size of the namespace: nothing beyond is ever addressed
  uint32_t transfer_bytes_max;
  uint32_t descriptor_mode;
  uint32_t page_bytes;       // PRP: memory page size
  uint32_t bit_bucket;       // SGL: padding of reads may be discarded
  uint32_t qid;
  uint32_t device;           // which device of the store
  uint32_t part;             // this warp's part of the device's run: part of parts
  uint32_t parts;
  uint32_t boundary_lbas;    // NOIOB: commands that cross no multiple of it are faster; 0 = none
  uint32_t placements;       // entries of placement_ids
  // the warp's own
  uint32_t sq_tail;
  uint32_t cq_head;          // free running
  uint32_t ring_head;        // free running: next submission ring entry
  uint32_t free_count;
  uint32_t outstanding;
  uint32_t cursor_active;    // which active operation is generating; GIO_WINDOW = none
  uint32_t cursor_row;
  uint32_t cursor_at;        // next split of the row's run
  uint32_t fault;
  uint32_t quarantined;      // slots in state 2
  uint64_t swept_ns;         // when the slots were last checked for timeouts
  uint64_t idle_ns;          // since when every operation of the kernel is complete; 0 = not now
  // counters
  uint64_t commands;
  uint64_t objects;
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t sq_doorbells;
  uint64_t cq_doorbells;
  uint64_t errors;
  uint64_t late;             // completions that came after their timeout
  gio_active active[GIO_WINDOW];
  gio_op op;                 // of cursor_active
  uint16_t placement_ids[GIO_PLACEMENTS]; // DSPEC of each placement handle; by the host
  uint64_t waiting_ns;       // since when the next operation waits for its event; 0 = it does not
  uint64_t waited_ns;        // when that was last seen
  uint32_t window;           // one bit per operation in progress
  uint32_t checked;          // those whose objects have checksums to verify
  uint64_t reserved[5];
} gio_warp;                  // 1344 bytes: whole cache lines, warps on different threads share none

// Copy of the words that the host writes, in memory near the kernel. Reads of one line of host
// memory by several SMs are served one after the other, a round trip of the link each, and
// meanwhile delay all other memory accesses of the GPU. So one warp at a time reads the host's
// words and copies them to this relay, which the others poll. IOCBs and ring follow it:
// gio_iocb[ring_mask + 1], then u64[ring_mask + 1].
typedef struct gio_relay {
  uint32_t lock;       // 1 = a warp is reading
  uint32_t head;       // ring entries copied, free running
  uint32_t reached;    // the operations up to here may start: their events are reached
  uint32_t wait_value; // of the event of the last entry copied
  uint64_t wait;       // u32: address of that event until it is reached; entries behind it wait
  uint64_t stop;       // 0, or GIO_STOP_*
  uint64_t left;       // the last launch that exits: no ring entry was left when it was decided
  uint32_t closed;     // 1 = no event is awaited any more
  uint32_t failed;     // queues with a fault
  uint32_t reserved[20];
} gio_relay;           // 128 bytes

// Arguments of a kernel launch or of a host thread's turn.
typedef struct gio_args {
  uint64_t warps;      // gio_warp[warp_count]
  uint64_t iocbs;      // gio_iocb[ring_mask + 1]
  uint64_t progress;   // gio_progress[ring_mask + 1]
  uint64_t sq_ring;    // u64[ring_mask + 1]: (position + 1) << 32 | iocb id
  uint64_t cq_ring;    // u64[ring_mask + 1]: the same form
  uint64_t cq_tail;    // u32: next position of the completion ring, shared by all warps
  uint64_t stop;       // u64: nonzero = submit nothing more, end when nothing is outstanding
  uint64_t relay;      // gio_relay; 0 = each warp reads the host's words itself
  uint64_t exited;     // u64: the last launch that has exited, or is about to (engine.cuh);
                       //   0 = the kernel stays until the stop word
  uint64_t clock;      // u64: virtual time in ns; 0 = the processor's own clock
  uint64_t timeout_ns; // of a command
  uint64_t event_timeout_ns; // of an operation whose event does not come; 0 = none
  uint64_t linger_ns;  // the kernel leaves when it had nothing to do for so long
  uint64_t launch;     // number of this launch, from 1 on
  uint32_t warp_count;
  uint32_t ring_mask;
  uint32_t rounds;     // host: give the thread back after this many rounds
  uint32_t reserved;
} gio_args;            // 128 bytes

// clang-format on
#endif
