// Ripieno: NVMe SSDs as a memory tier for the KV cache of LLM engines.
//
// A store keeps KV blocks under 256-bit keys. The engine registers its KV memory once, when it
// opens the store in its home, a directory. Then, for each request of its own:
//
//     ripieno_lookup          the longest run of blocks that is stored
//     ripieno_retrieve_begin  which blocks of the pool they go to
//     ripieno_layer_start     for each layer; costs the same for any number of blocks
//     ripieno_layer_wait      before the layer is used
//     ripieno_request_end
//     ripieno_prefix_release
//
//     ripieno_store_begin     what is to be stored under which keys
//     ripieno_layer_start     for each layer, once it was computed
//     ripieno_commit          permanent, and visible, when it returns
//
// ripieno_move_all moves all layers at once. examples/engine.c does all of that.
//
// Rules for all functions:
//
// - Results. A function that can fail returns a ripieno_status; ripieno_last_error says why, for
//   each thread. Outputs are written on success only. Besides the failures named with a function,
//   each can return RIPIENO_STATUS_PANIC, and one that takes a struct RIPIENO_STATUS_VERSION.
// - Threads. Any number of threads may use any handle at the same time, but for the one call that
//   gives it back (ripieno_close, _prefix_release, _commit, _request_end): nothing else may use the
//   handle then or later. Calls that move data, or wait, do not hold up lookups.
// - Pointers. What is passed by pointer belongs to the caller, and is not kept: but the memory of
//   the pool, which has to stay until the store was closed (see ripieno_pool). Null is refused
//   where something is needed. Pointers are aligned as C aligns them.
// - Structs begin with their size. Set it to sizeof, and everything that is not needed to zero:
//   RIPIENO_CONFIG_INIT and its like do both. Later versions only add fields at the end.
// - Units. Sizes and offsets are in bytes, blocks and layers count from 0.
// - A process that has a store open must not fork without exec.
//
// Versions follow semantic versioning (https://semver.org/): see RIPIENO_VERSION_MAJOR.
//
// Made by `cargo xtask c header`: do not edit.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Version of the library that this header belongs to. A new major version may break programs; a
// new minor one only adds (before 1.0, it may break them); a new patch only repairs. The shared
// library's soname is libripieno.so.MAJOR, before 1.0 libripieno.so.0.MINOR.
#define RIPIENO_VERSION_MAJOR 0

// See RIPIENO_VERSION_MAJOR.
#define RIPIENO_VERSION_MINOR 1

// See RIPIENO_VERSION_MAJOR.
#define RIPIENO_VERSION_PATCH 0

// A flag of ripieno_config: where there is no home, make one and format a store in it.
#define RIPIENO_CREATE 1

// For ripieno_config.dram_mode: what is stored, retrieved or prefetched is kept in memory.
#define RIPIENO_DRAM_WRITE_THROUGH 0

// For ripieno_config.dram_mode: only what is prefetched is.
#define RIPIENO_DRAM_READ_AHEAD 1

// For ripieno_config.dram_mode: as DRAM_WRITE_THROUGH, but what is stored is copied there, and
// written to the devices later.
#define RIPIENO_DRAM_WRITE_BACK 2

// Bytes of a key.
#define RIPIENO_KEY_BYTES 32

// A bit of ripieno_poll_events: the owner of a device wants it back, and waits until the store is
// closed. Stays set.
#define RIPIENO_EVENT_REQUESTED 1

// The health of a device changed; if its media became read-only, storing fails from now on.
#define RIPIENO_EVENT_HEALTH (1 << 1)

// A device had an uncorrectable PCIe error, and was reset. What was in flight may have failed.
#define RIPIENO_EVENT_PCIE_ERROR (1 << 2)

// A device reported something else; nothing has to be done.
#define RIPIENO_EVENT_OTHER (1 << 3)

// What became of a call. Later versions may add failures: take a number that is not here for one.
enum ripieno_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // It was done.
    RIPIENO_STATUS_OK = 0,
    // An argument makes no sense: null, out of range, a handle of another store.
    RIPIENO_STATUS_INVALID = 1,
    // There is no home in this directory, or one that was not completed; see RIPIENO_CREATE.
    RIPIENO_STATUS_NOT_FOUND = 2,
    // The directory or a device holds something else, which would be lost.
    RIPIENO_STATUS_OCCUPIED = 3,
    // Another process uses the home.
    RIPIENO_STATUS_LOCKED = 4,
    // There is not enough space on the disk.
    RIPIENO_STATUS_NO_SPACE = 5,
    // Home, devices or journal are not what they were: damaged, missing, swapped, of another
    // store or for blocks of another shape.
    RIPIENO_STATUS_DAMAGED = 6,
    // The operating system or a device refused something.
    RIPIENO_STATUS_SYSTEM = 7,
    // All that may be in flight at a time is in flight: end something, then try again.
    RIPIENO_STATUS_BUSY = 8,
    // Data did not get where it was to go. Retrieving: the blocks count as not stored from now on.
    // Storing: nothing of the request is visible.
    RIPIENO_STATUS_IO = 9,
    // A block was dropped after the lookup: look up again.
    RIPIENO_STATUS_STALE = 10,
    // Nothing can be stored any more; what is stored can still be retrieved.
    RIPIENO_STATUS_READ_ONLY = 11,
    // The store does nothing any more, or was closed. Close it and open it again.
    RIPIENO_STATUS_FAILED = 12,
    // A defect of the library.
    RIPIENO_STATUS_PANIC = 13,
    // The program was compiled for a newer library, and uses what is new in it.
    RIPIENO_STATUS_VERSION = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ripieno_status ripieno_status;
#else
typedef int32_t ripieno_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Blocks that a lookup found. They are not evicted until it is given back.
typedef struct ripieno_prefix ripieno_prefix;

// Blocks that are being retrieved or stored.
typedef struct ripieno_request ripieno_request;

// A handle of a store that works in one namespace. Any number of threads may use it, and any
// number of handles of one store may exist.
typedef struct ripieno_store ripieno_store;

// What a KV block is made of. One object is what a layer and segment keep for the tokens of a
// block.
typedef struct {
    // Layers of the model.
    uint32_t layers;
    // Objects of a layer: 2 where K and V are separate tensors, 1 where they are one (MLA).
    uint32_t segments;
    // Bytes of an object.
    uint32_t object_bytes;
    // Tokens of a block.
    uint32_t block_tokens;
} ripieno_shape;

// The engine's KV memory. The object of block b in layer l and segment s is at
// base + rows[l * segments + s] + b * block_stride. Any alignment will do; multiples of 4 bytes
// need no copies on any device.
typedef struct {
    // sizeof(ripieno_pool).
    size_t size;
    // First byte; of this process's memory.
    void *base;
    // Bytes from base on.
    size_t bytes;
    // Offset of block 0 of each row, in bytes; null: one tensor of blocks x object after another,
    // in the order of the rows.
    const uint64_t *rows;
    // Entries of rows: layers * segments.
    size_t rows_count;
    // Bytes from one block's object to the next one's; 0: object_bytes.
    uint64_t block_stride;
    // Blocks of the pool.
    uint32_t blocks;
    // Zero.
    uint32_t reserved;
    // Called once, on any thread, when nothing reaches the memory any more: when the store was
    // closed, or ripieno_open failed (but not where it could not read this struct). Until then the
    // memory has to stay mapped. Never called where a device may still reach it after a failure.
    // May be null: ripieno_close that returns RIPIENO_STATUS_OK says the same.
    void (*release)(void*);
    // The argument of release.
    void *release_context;
} ripieno_pool;

// Everything that has to be equal for two engines to read each other's blocks. Keys of two
// namespaces never match. Strings are UTF-8 and end with a zero byte; null means empty.
typedef struct {
    // sizeof(ripieno_namespace).
    size_t size;
    // Digest of the model's weights, or of their name and revision.
    uint8_t weights[32];
    // How a block lies in memory: shape, order of dimensions, rows.
    const char *layout;
    // Type of an element, such as "bfloat16".
    const char *dtype;
    // Adapter (LoRA) the blocks were computed with.
    const char *adapter;
    // What the tenant's blocks are kept apart with. Only its digest is stored.
    const uint8_t *tenant_salt;
    // Bytes of tenant_salt.
    size_t tenant_salt_bytes;
    // For reports: no part of the identity. At most 64 bytes.
    const char *label;
    // Tokens of a block.
    uint32_t block_tokens;
    // Zero.
    uint32_t reserved;
} ripieno_namespace;

// What a store is opened with.
typedef struct {
    // sizeof(ripieno_config).
    size_t size;
    // The directory that is the store's home: a file for each software controller, a lock, and
    // their parameters. Its parent has to exist.
    const char *home;
    // RIPIENO_CREATE, or 0.
    uint64_t flags;
    // A new home: bytes on the disk, over all files, at the most. They are allocated at once.
    uint64_t capacity_bytes;
    // A new home: software controllers, each with a file; 1 to 64, or 0 for 1.
    uint32_t devices;
    // A new home: bytes of a logical block: 512 or 4096, or 0 for 4096.
    uint32_t lba_bytes;
    // What a KV block is made of; has to be that of the store that is there.
    ripieno_shape shape;
    // The engine's KV memory. While the store is being opened, some of it is used for tests, and
    // put back as it was: at its ends, and in its first and last block.
    const ripieno_pool *pool;
    // The namespace of the handle that is returned; null: an empty one.
    const ripieno_namespace *namespace_;
    // Queue pairs of each device, 1 to 64; 0 for 1.
    uint32_t queues_per_device;
    // Entries of a queue, a power of two from 2 to 1024; 0 for 256.
    uint32_t queue_depth;
    // Bytes of this process's memory in which blocks that were stored or retrieved are kept beside
    // the devices: what is found there is copied, and not read. 0 for none.
    uint64_t dram_bytes;
    // What gets into it: RIPIENO_DRAM_WRITE_THROUGH, RIPIENO_DRAM_READ_AHEAD or
    // RIPIENO_DRAM_WRITE_BACK.
    uint32_t dram_mode;
    // Zero.
    uint32_t reserved;
} ripieno_config;

// What a namespace holds.
typedef struct {
    // sizeof(ripieno_usage); to be set by the caller.
    size_t size;
    // Blocks that lookups find.
    uint32_t stored;
    // Of these, used by prefixes and requests: not evicted.
    uint32_t active;
    // Of these, pinned: not evicted.
    uint32_t pinned;
    // Of these, neither used nor pinned.
    uint32_t evictable;
    // Blocks that are being stored.
    uint32_t writing;
    // Blocks the namespace may have; UINT32_MAX: no limit.
    uint32_t quota;
    // How often it was dropped by ripieno_bump_epoch.
    uint64_t epoch;
    // Blocks that were asked for, since the store was opened.
    uint64_t asked;
    // Blocks of these that were found.
    uint64_t hits;
    // Blocks that were committed, since the store was opened.
    uint64_t committed;
} ripieno_usage;

// Counts of a whole store since it was opened, and what it holds now.
typedef struct {
    // sizeof(ripieno_stats); to be set by the caller.
    size_t size;
    // 1: blocks are copied through bounce buffers, because the devices cannot describe where the
    // pool's objects are.
    uint32_t bounced;
    // Blocks there is room for.
    uint32_t blocks;
    // Of these, free ones.
    uint32_t blocks_free;
    // Blocks that lookups find.
    uint32_t blocks_stored;
    // Blocks that are being stored.
    uint32_t blocks_writing;
    // Zero.
    uint32_t reserved;
    // Bytes of a block on the devices, padding included.
    uint64_t block_bytes;
    // Calls of ripieno_lookup.
    uint64_t lookups;
    // Blocks that they asked for.
    uint64_t blocks_asked;
    // Blocks that they found.
    uint64_t blocks_hit;
    // Blocks that made room for others.
    uint64_t evictions;
    // Blocks that were dropped because reading them failed.
    uint64_t blocks_lost;
    // Bytes that were stored, without padding.
    uint64_t stored_bytes;
    // Bytes that were retrieved from the devices, without padding.
    uint64_t retrieved_bytes;
    // Bytes that were written to the journal.
    uint64_t journal_bytes;
    // Times the devices were recovered from a timeout or a fault.
    uint64_t recoveries;
    // NVMe commands of the I/O kernel.
    uint64_t commands;
    // Blocks of retrievals that were in the memory of ripieno_config.dram_bytes.
    uint64_t dram_hits;
    // Blocks of retrievals that were not; 0 without such memory.
    uint64_t dram_misses;
    // Bytes that were retrieved from there.
    uint64_t dram_retrieved_bytes;
    // Blocks that are there now.
    uint64_t dram_blocks;
    // Blocks that went from there for others.
    uint64_t dram_evictions;
    // Bytes that were read from the devices ahead of time.
    uint64_t dram_prefetched_bytes;
    // Of these, bytes that nobody retrieved before they went.
    uint64_t dram_wasted_bytes;
    // Blocks that no device has yet (RIPIENO_DRAM_WRITE_BACK).
    uint64_t dram_dirty;
    // Bytes that were written to the devices from there.
    uint64_t dram_written_back_bytes;
    // Bytes that were dropped before any device got them.
    uint64_t dram_spared_bytes;
} ripieno_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The message of this thread's last call that failed: what was asked, what was found, and what to
// do; UTF-8. Empty if none did. Good until the thread's next call that fails.
const char *ripieno_last_error(void);

// The name of a status, such as "RIPIENO_STATUS_BUSY"; of an unknown one, "unknown status".
// Static.
const char *ripieno_status_name(int32_t status);

// The version of the library that is running, made as RIPIENO_VERSION is: MAJOR * 1000000 +
// MINOR * 1000 + PATCH. It needs no check where the program was linked with the shared library.
uint32_t ripieno_version(void);

// Opens the store in a home. With RIPIENO_CREATE, a home that does not exist, or was not
// completed, is made first.
//
// Takes as long as reading the journal: see docs/on-disk-format.md.
//
// Fails with RIPIENO_STATUS_NOT_FOUND, RIPIENO_STATUS_OCCUPIED, RIPIENO_STATUS_LOCKED,
// RIPIENO_STATUS_NO_SPACE, RIPIENO_STATUS_DAMAGED, RIPIENO_STATUS_SYSTEM, RIPIENO_STATUS_INVALID.
ripieno_status ripieno_open(const ripieno_config *config, ripieno_store **store);

// Another handle of the same store, in another namespace. Blocks of one namespace are never found
// in another one.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_within(const ripieno_store *store,
                              const ripieno_namespace *namespace_,
                              ripieno_store **other);

// Gives a handle back, also when it fails. The last handle of a store closes it: waits for what is
// in flight, makes everything permanent, lets go of the home and of the engine's memory. Prefixes
// and requests that still exist can then only be given back. Null is fine.
//
// Fails with RIPIENO_STATUS_READ_ONLY when the journal could not be written;
// RIPIENO_STATUS_FAILED when something did not stop: the engine's memory must then stay where it
// is until it is released (ripieno_pool.release).
ripieno_status ripieno_close(ripieno_store *store);

// How many leading keys are stored now. Has no effect, and does not keep the blocks: they may be
// evicted at once.
//
// keys: count keys of RIPIENO_KEY_BYTES bytes, one behind another: 256-bit digests over a block's
// tokens and all tokens before them.
//
// Fails with RIPIENO_STATUS_INVALID.
ripieno_status ripieno_peek(const ripieno_store *store,
                            const uint8_t *keys,
                            size_t count,
                            size_t *found);

// Finds the longest run of leading keys that is stored, which may be empty. Does not wait for any
// I/O. The prefix has to be given back with ripieno_prefix_release.
//
// keys: as for ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_lookup(const ripieno_store *store,
                              const uint8_t *keys,
                              size_t count,
                              ripieno_prefix **prefix);

// Starts reading the longest stored run of leading keys into the memory of
// ripieno_config.dram_bytes, but for what is there: a request that comes soon copies it. It is
// kept for one for within_ms milliseconds; then it is like other blocks. found: how many leading
// blocks are there or on their way; 0 without such memory, and none more while half of all that
// may be in flight is. Waits for nothing, and holds no blocks. What is on its way holds up what is
// started later: ask for what runs next.
//
// keys: as for ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_prefetch(const ripieno_store *store,
                                const uint8_t *keys,
                                size_t count,
                                uint32_t within_ms,
                                size_t *found);

// Blocks that were found; 0 for null.
size_t ripieno_prefix_blocks(const ripieno_prefix *prefix);

// Gives a prefix back. Requests that were begun with it keep the blocks they need. Null is fine.
void ripieno_prefix_release(ripieno_prefix *prefix);

// Pins those of the keys that are stored: they are not evicted until they are unpinned, also after
// the store was opened again. found: how many that are.
//
// keys: as for ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_pin(const ripieno_store *store,
                           const uint8_t *keys,
                           size_t count,
                           uint32_t *found);

// Undoes ripieno_pin. found: how many of the keys are stored.
//
// keys: as for ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_unpin(const ripieno_store *store,
                             const uint8_t *keys,
                             size_t count,
                             uint32_t *found);

// Drops the keys, pinned and used ones too. found: how many were stored. Their space is used again
// when no prefix and no request needs them any more.
//
// keys: as for ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_remove(const ripieno_store *store,
                              const uint8_t *keys,
                              size_t count,
                              uint32_t *found);

// Drops everything in the namespace, pinned and used blocks too.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_clear(const ripieno_store *store);

// Evicts up to so many blocks of the namespace that are neither pinned nor used. evicted: how many
// there were.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_evict(const ripieno_store *store, uint32_t blocks, uint32_t *evicted);

// Starts a new epoch of the namespace: as ripieno_clear, and what is being stored now will not be
// found either. For a model, adapter or salt that changed under the same name.
//
// The new epoch is permanent when the next ripieno_sync has returned: after a crash before that,
// the blocks of the old one may be found again.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_bump_epoch(const ripieno_store *store, uint64_t *epoch);

// Limits the namespace to so many blocks; UINT32_MAX: no limit.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_set_quota(const ripieno_store *store, uint32_t blocks);

// Says how much longer than those of other namespaces its blocks are kept unused: weight times as
// long as with 1, which is the default.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_set_weight(const ripieno_store *store, uint32_t weight);

// Makes permanent what was evicted, pinned, removed, cleared or registered so far, and with
// RIPIENO_DRAM_WRITE_BACK what was committed. Without, that is permanent when ripieno_commit
// returns.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_sync(const ripieno_store *store);

// Prepares to retrieve blocks of a prefix: the one at position first goes to the first of blocks,
// and so on. Nothing moves before ripieno_layer_start. The request has to be given back with
// ripieno_request_end.
//
// store: any handle of the store in which the prefix was found.
// blocks: count different blocks of the pool, which belong to the request until its layers were
// waited for.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY (bounce buffers), RIPIENO_STATUS_STALE,
// RIPIENO_STATUS_FAILED.
ripieno_status ripieno_retrieve_begin(const ripieno_store *store,
                                      const ripieno_prefix *prefix,
                                      size_t first,
                                      const uint32_t *blocks,
                                      size_t count,
                                      ripieno_request **request);

// Makes room for blocks, evicting others if necessary, and prepares to store them. Nothing moves
// before ripieno_layer_start. The request has to be given back with ripieno_commit or
// ripieno_request_end.
//
// A key that is stored already, or that another request is storing, is not stored again: its block
// is not read.
//
// keys: count keys, as for ripieno_peek.
// blocks: count blocks of the pool, which must not change until their layers were waited for.
// accepted: how many leading blocks there is room for, which may be 0; the rest is not stored.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY (bounce buffers),
// RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_store_begin(const ripieno_store *store,
                                   const uint8_t *keys,
                                   const uint32_t *blocks,
                                   size_t count,
                                   ripieno_request **request,
                                   size_t *accepted);

// Starts to move a layer of all blocks of a request. Costs the same for any number of blocks, and
// does not wait. Layers may be in flight together, and end in any order.
//
// layer: 0 to layers - 1.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO (a layer of the
// request failed before), RIPIENO_STATUS_FAILED.
ripieno_status ripieno_layer_start(const ripieno_request *request, uint32_t layer);

// Moves all layers of a request, and waits for them: instead of ripieno_layer_start and
// ripieno_layer_wait for each, where nothing is done between layers. When this returns, nothing
// touches the blocks any more; but for RIPIENO_STATUS_FAILED.
//
// Fails as they do; not all layers were moved then.
ripieno_status ripieno_move_all(const ripieno_request *request);

// Waits for a layer that was started. When this returns, whatever it returns, nothing touches the
// layer's blocks any more; but for RIPIENO_STATUS_FAILED: then a device may still do. One thread
// waits for a layer.
//
// Fails with RIPIENO_STATUS_INVALID (not started, or waited for), RIPIENO_STATUS_IO,
// RIPIENO_STATUS_FAILED.
ripieno_status ripieno_layer_wait(const ripieno_request *request, uint32_t layer);

// As ripieno_layer_wait, without waiting. done: whether the layer has ended; if not, ask again.
//
// Fails with RIPIENO_STATUS_INVALID (not started, or waited for), RIPIENO_STATUS_IO,
// RIPIENO_STATUS_FAILED.
ripieno_status ripieno_layer_poll(const ripieno_request *request, uint32_t layer, bool *done);

// Makes what a request stored permanent, and visible to lookups. Waits for its layers in flight.
// With RIPIENO_DRAM_WRITE_BACK it may be permanent only after the next ripieno_sync.
// When it returns RIPIENO_STATUS_OK, the blocks are found again after a crash or a loss of power.
// Otherwise nothing of the request is visible.
//
// The request is given back, also when this fails.
//
// Fails with RIPIENO_STATUS_INVALID (a layer was not started; not a storing request),
// RIPIENO_STATUS_IO, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_commit(ripieno_request *request);

// Gives a request back, and waits for its layers in flight: its blocks are the engine's again.
// What it stored without a ripieno_commit is gone. Null is fine.
void ripieno_request_end(ripieno_request *request);

// What the namespace of this handle holds.
//
// usage: size has to be set; the rest is filled.
//
// Fails with RIPIENO_STATUS_INVALID.
ripieno_status ripieno_get_usage(const ripieno_store *store, ripieno_usage *usage);

// Counts of the whole store, all namespaces together.
//
// stats: size has to be set; the rest is filled.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_get_stats(const ripieno_store *store, ripieno_stats *stats);

// What devices reported since the last call: RIPIENO_EVENT_* together, 0 for nothing. The store
// does what is to be done, but for one thing: after RIPIENO_EVENT_REQUESTED, end what is in flight
// and close it (ripieno_close) with all its handles. To be called about once a second, also while
// nothing else is done; costs next to nothing.
//
// Fails with RIPIENO_STATUS_INVALID; RIPIENO_STATUS_FAILED when a device was removed or cannot be
// recovered.
ripieno_status ripieno_poll_events(const ripieno_store *store, uint64_t *events);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// Version of this header as one number, to be compared.
#define RIPIENO_VERSION \
    (RIPIENO_VERSION_MAJOR * 1000000 + RIPIENO_VERSION_MINOR * 1000 + RIPIENO_VERSION_PATCH)

// Structs with their size, and zeros; for C, and C++ from C++20 on.
#define RIPIENO_CONFIG_INIT { .size = sizeof(ripieno_config) }
#define RIPIENO_POOL_INIT { .size = sizeof(ripieno_pool) }
#define RIPIENO_NAMESPACE_INIT { .size = sizeof(ripieno_namespace) }
#define RIPIENO_USAGE_INIT { .size = sizeof(ripieno_usage) }
#define RIPIENO_STATS_INIT { .size = sizeof(ripieno_stats) }
