// Ripieno: NVMe SSDs as a memory tier for the KV cache of LLM engines.
//
// A store keeps KV blocks under 256-bit keys. The engine registers its KV memory once, when it
// opens the store in a directory. ripieno_load and ripieno_save then move whole blocks
// (examples/hello.c). Layer by layer, while the engine computes the others (examples/engine.c):
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
// Rules for all functions:
//
// - Results. A function that can fail returns a ripieno_status; ripieno_last_error returns the
//   reason of the thread's last failure. Outputs are written on success only. In addition to the
//   failures listed for it, each function can return RIPIENO_STATUS_PANIC, one that takes a struct
//   RIPIENO_STATUS_VERSION, and one of a server's store RIPIENO_STATUS_UNSUPPORTED,
//   RIPIENO_STATUS_BUSY (a limit of the server) and RIPIENO_STATUS_FAILED (it has ended).
// - Threads. Any number of threads may use a handle at the same time, except in the call that ends
//   it (ripieno_close, _prefix_release, _commit, _request_end): no other call may use the handle
//   then or later. Calls that move data or wait do not block lookups.
// - Pointers. Memory passed by pointer belongs to the caller and is not kept after the call, except
//   that of the pool, which must stay valid until the store is closed (see ripieno_pool). A
//   required pointer that is null is refused. Pointers have C's alignment.
// - Structs begin with their size. Set it to sizeof and all unneeded fields to zero, as
//   RIPIENO_CONFIG_INIT and the other initializers do. Later versions only add fields at the end.
// - Units. Sizes and offsets are in bytes, blocks and layers count from 0.
// - fork. Handles belong to the process that made them. In a process that was forked from it, every
//   call of theirs returns RIPIENO_STATUS_FAILED, and releasing them frees their memory only: the
//   library's threads are not there. ripieno_open works there, for another directory, for this one
//   when the parent has closed it, or for a server.
// - The end of the process. Nothing waits for open handles: it is as if the process was killed.
//   Committed blocks are found again, and what needs ripieno_sync or ripieno_close may be lost.
//
// Versions follow semantic versioning (https://semver.org/): see RIPIENO_VERSION_MAJOR.
//
// Made by `cargo xtask c header`: do not edit.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Version of the library that this header belongs to. A new major version may break compatibility;
// a new minor one only adds (before 1.0, it may break compatibility); a new patch only fixes. The
// shared library's soname is libripieno.so.MAJOR, before 1.0 libripieno.so.0.MINOR.
#define RIPIENO_VERSION_MAJOR 0

// See RIPIENO_VERSION_MAJOR.
#define RIPIENO_VERSION_MINOR 1

// See RIPIENO_VERSION_MAJOR.
#define RIPIENO_VERSION_PATCH 0

// Bytes of a key.
#define RIPIENO_KEY_BYTES 32

// A bit of ripieno_poll_events: the owner of a device requests it back, and waits until the store
// is closed. Stays set.
#define RIPIENO_EVENT_REQUESTED 1

// The health of a device changed; if its media became read-only, storing fails from now on.
#define RIPIENO_EVENT_HEALTH (1 << 1)

// A device had an uncorrectable PCIe error and was reset. I/O in flight may have failed.
#define RIPIENO_EVENT_PCIE_ERROR (1 << 2)

// A device reported another event; no action is needed.
#define RIPIENO_EVENT_OTHER (1 << 3)

// Result of a call. Later versions may add failures: treat an unknown number as a failure.
enum ripieno_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Success.
    RIPIENO_STATUS_OK = 0,
    // An argument is invalid: null, out of range, or a handle of another store.
    RIPIENO_STATUS_INVALID = 1,
    // The directory has no store, or an incomplete one; or no server is there.
    RIPIENO_STATUS_NOT_FOUND = 2,
    // The directory or a device holds other data, which would be lost.
    RIPIENO_STATUS_OCCUPIED = 3,
    // Another process uses the store.
    RIPIENO_STATUS_LOCKED = 4,
    // The disk has too little space.
    RIPIENO_STATUS_NO_SPACE = 5,
    // Home, devices or journal do not match the store: damaged, missing, swapped, of another store
    // or for blocks of another shape.
    RIPIENO_STATUS_DAMAGED = 6,
    // The operating system or a device refused a request.
    RIPIENO_STATUS_SYSTEM = 7,
    // The limit of operations in flight is reached: end one, then try again.
    RIPIENO_STATUS_BUSY = 8,
    // A transfer failed. When retrieving, the blocks count as not stored from now on. When
    // storing, no block of the request is visible. With a server, also in place of
    // RIPIENO_STATUS_STALE.
    RIPIENO_STATUS_IO = 9,
    // A block was dropped after the lookup: look up again.
    RIPIENO_STATUS_STALE = 10,
    // The store accepts no more writes; stored blocks can still be retrieved.
    RIPIENO_STATUS_READ_ONLY = 11,
    // The store has failed or was closed, or its server has ended: close it and open it again. Or
    // this process was forked from the one that opened it.
    RIPIENO_STATUS_FAILED = 12,
    // A bug in the library.
    RIPIENO_STATUS_PANIC = 13,
    // The program was compiled for a newer library, and uses its additions.
    RIPIENO_STATUS_VERSION = 14,
    // A server has the store, and does not do this for its clients.
    RIPIENO_STATUS_UNSUPPORTED = 15,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum ripieno_status ripieno_status;
#else
typedef int32_t ripieno_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Blocks found by a lookup. They are not evicted until the prefix is released.
typedef struct ripieno_prefix ripieno_prefix;

// A retrieval or storing of blocks.
typedef struct ripieno_request ripieno_request;

// A handle of a store in one namespace. Any number of threads may use it, and a store may have any
// number of handles.
typedef struct ripieno_store ripieno_store;

// Shape of a KV block. An object is the data of one layer and segment for the tokens of one block.
typedef struct {
    // Layers of the model.
    uint32_t layers;
    // Objects of a layer: 2 if K and V are separate tensors, 1 if they are one (MLA).
    uint32_t segments;
    // Bytes of an object.
    uint32_t object_bytes;
    // Tokens of a block.
    uint32_t block_tokens;
} ripieno_shape;

// The engine's KV memory. The object of block b in layer l and segment s is at
// base + rows[l * segments + s] + b * block_stride. Any alignment is allowed; multiples of 4 bytes
// need no copies on any device.
typedef struct {
    // sizeof(ripieno_pool).
    size_t size;
    // First byte, in this process's memory.
    void *base;
    // Length in bytes.
    size_t bytes;
    // Offset of block 0 of each row, in bytes; null: one tensor of blocks x object after another,
    // in row order.
    const uint64_t *rows;
    // Entries of rows: layers * segments.
    size_t rows_count;
    // Bytes from one block's object to the next one's; 0: object_bytes.
    uint64_t block_stride;
    // Blocks of the pool.
    uint32_t blocks;
    // Zero.
    uint32_t reserved;
    // Called once, on any thread, when nothing accesses the memory any more: after the store was
    // closed, or after ripieno_open failed (unless it could not read this struct). Until then the
    // memory must stay mapped. Never called if a device may still access it after a failure. May
    // be null: RIPIENO_STATUS_OK from ripieno_close means the same.
    void (*release)(void*);
    // The argument of release.
    void *release_context;
    // With a server: the file that is mapped at base (MAP_SHARED, from its first byte), whose size
    // is bytes: a memfd (memfd_create) of whole small pages, sealed with F_SEAL_SHRINK. The server
    // maps it, too. May be closed after ripieno_open. Otherwise unused: 0.
    int file;
    // Zero.
    uint32_t reserved_2;
} ripieno_pool;

// Properties that must be equal for two engines to read each other's blocks. Keys of two
// namespaces never match. Strings are UTF-8 and end with a zero byte; null means empty.
typedef struct {
    // sizeof(ripieno_namespace).
    size_t size;
    // Digest of the model's weights, or of their name and revision.
    uint8_t weights[32];
    // Memory format of a block: shape, order of dimensions, rows.
    const char *layout;
    // Type of an element, such as "bfloat16".
    const char *dtype;
    // Adapter (LoRA) with which the blocks were computed.
    const char *adapter;
    // Salt that keeps the tenant's blocks apart. Only its digest is stored.
    const uint8_t *tenant_salt;
    // Bytes of tenant_salt.
    size_t tenant_salt_bytes;
    // Name for reports, not part of the identity. At most 64 bytes.
    const char *label;
    // Tokens of a block.
    uint32_t block_tokens;
    // Zero.
    uint32_t reserved;
} ripieno_namespace;

// Parameters of ripieno_open.
typedef struct {
    // sizeof(ripieno_config).
    size_t size;
    // Directory of the store, the option path: a file for each software controller, a lock, and
    // parameters. Its parent must exist. Null with a server, and with drives.
    const char *path;
    // Options of the store in TOML, as in the table store of a server's configuration, such as
    // "capacity = '64MiB'\ndevices = 2"; null for the defaults. With a capacity, a missing or
    // incomplete store is made first. All options: docs/reference/options.md.
    const char *options;
    // Shape of a KV block; must match the existing store.
    ripieno_shape shape;
    // The engine's KV memory. Opening the store tests with some of it, and restores the contents:
    // at its ends, and in its first and last block.
    const ripieno_pool *pool;
    // Namespace of the returned handle; null: an empty one.
    const ripieno_namespace *namespace_;
    // Socket of a server (ripieno serve), whose store is shared with its other clients; null for a
    // store of this process. The shape is that of the server's blocks, and the pool needs a file.
    // The server has its own path and options.
    const char *server;
} ripieno_config;

// Usage of a namespace.
typedef struct {
    // sizeof(ripieno_usage), set by the caller.
    size_t size;
    // Blocks that lookups find.
    uint32_t stored;
    // Of these, blocks used by prefixes and requests, or pinned: not evicted.
    uint32_t active;
    // Of these, blocks neither used nor pinned.
    uint32_t evictable;
    // Blocks being stored.
    uint32_t writing;
    // Maximum blocks of the namespace; UINT32_MAX: no limit.
    uint32_t quota;
    // Zero.
    uint32_t reserved;
    // Times it was dropped by ripieno_bump_epoch.
    uint64_t epoch;
    // Blocks looked up since the store was opened.
    uint64_t asked;
    // Of these, blocks found.
    uint64_t hits;
    // Blocks committed since the store was opened.
    uint64_t committed;
} ripieno_usage;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the message of this thread's last failed call: what was asked, what was found, and what
// to do; UTF-8. Empty if none failed. Valid until the thread's next failed call.
const char *ripieno_last_error(void);

// Returns the name of a status, such as "RIPIENO_STATUS_BUSY", or "unknown status". A static
// string.
const char *ripieno_status_name(int32_t status);

// Returns the version of the running library, in the form of RIPIENO_VERSION: MAJOR * 1000000 +
// MINOR * 1000 + PATCH. A program linked with the shared library need not check it.
uint32_t ripieno_version(void);

// Opens a store, or connects to that of a server. With a capacity in the options, a missing or
// incomplete store is made first.
//
// Takes as long as reading the journal; see docs/reference/on-disk-format.md.
//
// When a server ends, calls fail with RIPIENO_STATUS_FAILED until one connects to it again: treat
// all blocks as misses. Until then, blocks that were being retrieved may still be written to. If
// the store was closed meanwhile, open it with the same memory again, until that succeeds. A
// session that was lost while its server lives is ended first; RIPIENO_STATUS_BUSY if its
// transfers do not end.
//
// Fails with RIPIENO_STATUS_NOT_FOUND, RIPIENO_STATUS_OCCUPIED, RIPIENO_STATUS_LOCKED,
// RIPIENO_STATUS_NO_SPACE, RIPIENO_STATUS_DAMAGED, RIPIENO_STATUS_SYSTEM, RIPIENO_STATUS_BUSY,
// RIPIENO_STATUS_INVALID.
ripieno_status ripieno_open(const ripieno_config *config, ripieno_store **store);

// Makes another handle of the same store, in another namespace. Blocks of one namespace are never
// found in another one.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY (the namespace is new, and the store
// takes no writes any more), RIPIENO_STATUS_FAILED.
ripieno_status ripieno_within(const ripieno_store *store,
                              const ripieno_namespace *namespace_,
                              ripieno_store **other);

// Releases a handle, also if this fails. The last handle of a store closes it: waits for I/O in
// flight, makes everything durable, and releases directory or server, and the engine's
// memory. Remaining prefixes and requests can then only be released. Null is allowed.
//
// Fails with RIPIENO_STATUS_READ_ONLY if the journal could not be written; RIPIENO_STATUS_FAILED
// if something did not stop: the engine's memory must then stay mapped until it is released
// (ripieno_pool.release). After the end of its server it is not released: open the store again
// with the same memory, and close that. In a forked process it fails, and the store stays open.
ripieno_status ripieno_close(ripieno_store *store);

// Writes the key of a name: its SHA-256. For engines whose blocks have names of any length.
//
// name: its bytes; null if there are none.
// key: RIPIENO_KEY_BYTES bytes.
//
// Fails with RIPIENO_STATUS_INVALID.
ripieno_status ripieno_key_of_name(const uint8_t *name, size_t bytes, uint8_t *key);

// Returns the number of leading keys that are stored now. Has no effect, and does not hold the
// blocks: they may be evicted immediately.
//
// keys: count keys of RIPIENO_KEY_BYTES bytes each, contiguous: 256-bit digests of a block's
// tokens and all tokens before them.
//
// Fails with RIPIENO_STATUS_INVALID.
ripieno_status ripieno_peek(const ripieno_store *store,
                            const uint8_t *keys,
                            size_t count,
                            size_t *found);

// Reports for each key if it is stored now; like ripieno_peek without effect.
//
// keys: see ripieno_peek.
// stored: count entries.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_are_stored(const ripieno_store *store,
                                  const uint8_t *keys,
                                  size_t count,
                                  bool *stored);

// Finds the longest stored run of leading keys, which may be empty. Does not wait for I/O. Release
// the prefix with ripieno_prefix_release.
//
// keys: see ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_lookup(const ripieno_store *store,
                              const uint8_t *keys,
                              size_t count,
                              ripieno_prefix **prefix);

// Starts reading the longest stored run of leading keys into the cache of
// the option dram, except for cached blocks: a request that follows soon copies them.
// They are held for such a request for within_ms milliseconds; then they are ordinary blocks.
// found: number of leading blocks that are cached or in flight; 0 without a cache, as with a
// server. Starts no further blocks while half of the limit of I/O is in flight. Does not wait, and
// holds no blocks. Prefetches in flight delay later I/O: prefetch only for the next requests.
//
// keys: see ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_prefetch(const ripieno_store *store,
                                const uint8_t *keys,
                                size_t count,
                                uint32_t within_ms,
                                size_t *found);

// Returns the number of blocks found; 0 for null, and in a forked process.
size_t ripieno_prefix_blocks(const ripieno_prefix *prefix);

// Releases a prefix. Requests begun with it keep the blocks they need. Null is allowed.
void ripieno_prefix_release(ripieno_prefix *prefix);

// Pins the longest stored run of leading keys for a time: they are not evicted before it has
// passed, or ripieno_pin_end was called, or the store is closed; with a server, its connection or
// itself has ended. A day at most; with a server, what its configuration allows. All pins together
// have a limit of bytes, half of the store's: those beyond it take fewer blocks, or fail.
//
// keys: see ripieno_peek.
// seconds: 1 or more.
// pin: names it in ripieno_pin_end; 0 if none of the keys is stored.
// found: the number of blocks pinned.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY at the limit, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_pin_for(const ripieno_store *store,
                               const uint8_t *keys,
                               size_t count,
                               uint32_t seconds,
                               uint64_t *pin,
                               size_t *found);

// Ends a pin of ripieno_pin_for. One that has ended, and 0, are allowed.
//
// Fails with RIPIENO_STATUS_FAILED.
ripieno_status ripieno_pin_end(const ripieno_store *store, uint64_t pin);

// Drops the keys, including pinned ones and those in use. found: the number of keys that were
// stored. Their space is reused when no prefix and no request needs them any more.
//
// keys: see ripieno_peek.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_remove(const ripieno_store *store,
                              const uint8_t *keys,
                              size_t count,
                              uint32_t *found);

// Drops all blocks of the namespace, including pinned ones and those in use.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_clear(const ripieno_store *store);

// Evicts up to the given number of blocks of the namespace that are neither pinned nor in use.
// evicted: the number evicted.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_evict(const ripieno_store *store, uint32_t blocks, uint32_t *evicted);

// Starts a new epoch of the namespace: same as ripieno_clear, and blocks being stored now will not
// be found either. For a model, adapter or salt that changed under the same name.
//
// The new epoch is durable when the next ripieno_sync has returned: after a crash before that, the
// blocks of the old one may be found again.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_bump_epoch(const ripieno_store *store, uint64_t *epoch);

// Limits the namespace to the given number of blocks; UINT32_MAX: no limit.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_set_quota(const ripieno_store *store, uint32_t blocks);

// Sets the eviction weight of the namespace: its unused blocks are kept weight times as long as
// with 1, the default.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_set_weight(const ripieno_store *store, uint32_t weight);

// Makes all evictions, removals, clears and registrations so far durable. A commit is
// durable when ripieno_commit returns.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_sync(const ripieno_store *store);

// Retrieves those keys that are stored, each into its block, and returns when they have arrived.
// The other blocks are not written to. An engine that needs only a prefix passes the keys that
// ripieno_peek finds.
//
// keys: count keys, see ripieno_peek.
// blocks: count different blocks of the pool. After a failure their contents are undefined.
// found: count entries; true for a key that was found.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO,
// RIPIENO_STATUS_STALE, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_load(const ripieno_store *store,
                            const uint8_t *keys,
                            const uint32_t *blocks,
                            size_t count,
                            bool *found);

// Stores blocks under keys, and returns when they are durable and lookups find them.
//
// keys, blocks, accepted: see ripieno_store_begin.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO,
// RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED; see ripieno_commit.
ripieno_status ripieno_save(const ripieno_store *store,
                            const uint8_t *keys,
                            const uint32_t *blocks,
                            size_t count,
                            size_t *accepted);

// Prepares to retrieve blocks of a prefix: the one at position first goes to the first of blocks,
// and so on. Nothing moves before ripieno_layer_start. Release the request with
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
// before ripieno_layer_start. Release the request with ripieno_commit or ripieno_request_end.
//
// A key that is already stored, or being stored by another request, is not stored again: its block
// is not read.
//
// keys: count keys, see ripieno_peek.
// blocks: count blocks of the pool, which must not change until their layers were waited for.
// accepted: number of leading blocks with room for them, which may be 0; the rest is not stored.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY (bounce buffers),
// RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_store_begin(const ripieno_store *store,
                                   const uint8_t *keys,
                                   const uint32_t *blocks,
                                   size_t count,
                                   ripieno_request **request,
                                   size_t *accepted);

// Starts to move a layer of all blocks of a request. Costs the same for any number of blocks.
// Waits up to 60 seconds for other transfers if as many are in flight as there may be, and up to 5
// for a server's limit of bandwidth, and then fails with RIPIENO_STATUS_BUSY. Several layers may
// be in flight, and end in any order.
//
// layer: 0 to layers - 1.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_BUSY, RIPIENO_STATUS_IO (a layer of the
// request failed before), RIPIENO_STATUS_FAILED.
ripieno_status ripieno_layer_start(const ripieno_request *request, uint32_t layer);

// Moves all layers of a request, and waits for them. Replaces ripieno_layer_start and
// ripieno_layer_wait for each layer if there is no work between layers. On return, nothing
// accesses the blocks any more, except after RIPIENO_STATUS_FAILED.
//
// Fails like those functions; some layers were then not moved.
ripieno_status ripieno_move_all(const ripieno_request *request);

// Waits for a started layer. On return, with any status except RIPIENO_STATUS_FAILED, nothing
// accesses the layer's blocks any more; after that one a device still may. Only one thread may
// wait for a layer.
//
// Fails with RIPIENO_STATUS_INVALID (not started, or already waited for), RIPIENO_STATUS_IO,
// RIPIENO_STATUS_FAILED.
ripieno_status ripieno_layer_wait(const ripieno_request *request, uint32_t layer);

// Same as ripieno_layer_wait, but does not wait. done: true if the layer has ended.
//
// Fails with RIPIENO_STATUS_INVALID (not started, or already waited for), RIPIENO_STATUS_IO,
// RIPIENO_STATUS_FAILED.
ripieno_status ripieno_layer_poll(const ripieno_request *request, uint32_t layer, bool *done);

// Makes the stored blocks of a request durable, and visible to lookups. Waits for its layers in
// flight. After RIPIENO_STATUS_OK, the blocks are found again after a crash or power loss.
// Otherwise lookups of this process do not find them any more. After RIPIENO_STATUS_READ_ONLY they
// may be found, whole, when the store is opened again; with a server, also after
// RIPIENO_STATUS_FAILED.
//
// Releases the request, also if this fails.
//
// Fails with RIPIENO_STATUS_INVALID (a layer was not started; not a storing request),
// RIPIENO_STATUS_IO, RIPIENO_STATUS_READ_ONLY, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_commit(ripieno_request *request);

// Releases a request, after waiting for its layers in flight: its blocks are the engine's again.
// Blocks stored without a ripieno_commit are lost. Null is allowed. Waits for a device that does
// not answer until its timeouts; in a forked process, does nothing but free the handle.
void ripieno_request_end(ripieno_request *request);

// Reports the usage of this handle's namespace.
//
// usage: its size must be set; the other fields are filled.
//
// Fails with RIPIENO_STATUS_INVALID.
ripieno_status ripieno_get_usage(const ripieno_store *store, ripieno_usage *usage);

// Reports a counter of the whole store, over all namespaces: since it was opened, or as it is.
//
// name: of a sample in docs/reference/metrics.md, without "ripieno_": "evicted_blocks_total",
// "flush_seconds_sum", "device_commands_total{device=\"0\"}". There are none of the devices'
// health, of the time since opening, and of the time that computing would have taken.
//
// Fails with RIPIENO_STATUS_INVALID, RIPIENO_STATUS_FAILED.
ripieno_status ripieno_get_stat(const ripieno_store *store, const char *name, double *value);

// Reports events of the devices since the last call: RIPIENO_EVENT_* combined, 0 for none. The
// store handles them itself, with one exception: after RIPIENO_EVENT_REQUESTED, end all requests
// and close the store (ripieno_close) with all its handles. Call it about once a second, also
// while idle; it costs next to nothing.
//
// Fails with RIPIENO_STATUS_INVALID; RIPIENO_STATUS_FAILED if a device was removed or cannot be
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
