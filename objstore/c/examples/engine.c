// An engine that uses a store, in C11 and POSIX: it computes KV blocks and stores them layer by
// layer, is killed, opens the store again, and retrieves the committed blocks.
//
//     engine HOME COUNT
//
// A child stores sequences, one after another, and is killed (SIGKILL) after COUNT commits, while
// it continues. The parent then opens the store, retrieves every sequence that was committed in
// this run or an earlier one, and compares each byte.
//
// cc -std=c11 engine.c $(pkg-config --cflags --libs ripieno) -o engine

#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ripieno.h>

// A small model: 4 layers, separate K and V, blocks of 16 tokens of 512 bytes.
enum { LAYERS = 4, SEGMENTS = 2, ROWS = LAYERS * SEGMENTS, OBJECT = 16 * 512 };
// A sequence has 4 blocks of 64 KiB; the pool has room for 16, and the store for 600 sequences.
enum { SEQUENCE = 4, BLOCKS = 16, SEQUENCES = 600 };

struct engine {
    ripieno_store *store;
    // [ROWS][BLOCKS][OBJECT], the library's default if no rows are given.
    unsigned char *pool;
};

// Exits with the library's message if a call failed.
static void check(ripieno_status status, const char *what) {
    if (status == RIPIENO_STATUS_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, ripieno_status_name(status), ripieno_last_error());
    exit(1);
}

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

// The key of a block: an engine uses a digest of the block's tokens and all before them.
static void make_key(uint32_t sequence, uint32_t position, unsigned char *key) {
    for (uint64_t word = 0; word < RIPIENO_KEY_BYTES / 8; word++) {
        uint64_t value = mix((uint64_t)sequence << 32 | position << 8 | (word + 1));
        memcpy(key + 8 * word, &value, 8);
    }
}

static void make_keys(uint32_t sequence, unsigned char *keys) {
    for (uint32_t at = 0; at < SEQUENCE; at++) {
        make_key(sequence, at, keys + at * RIPIENO_KEY_BYTES);
    }
}

static unsigned char *object(struct engine *engine, uint32_t row, uint32_t block) {
    return engine->pool + ((size_t)row * BLOCKS + block) * OBJECT;
}

// Computes a block's object of a row: the same every time.
static uint64_t kv_word(uint32_t sequence, uint32_t position, uint32_t row, uint32_t at) {
    return mix((uint64_t)sequence << 40 ^ (uint64_t)position << 32 ^ (uint64_t)row << 24 ^ at);
}

static void compute(struct engine *engine, uint32_t sequence, uint32_t layer, uint32_t block) {
    for (uint32_t row = layer * SEGMENTS; row < (layer + 1) * SEGMENTS; row++) {
        for (uint32_t position = 0; position < SEQUENCE; position++) {
            unsigned char *to = object(engine, row, block + position);
            for (uint32_t at = 0; at < OBJECT / 8; at++) {
                uint64_t value = kv_word(sequence, position, row, at);
                memcpy(to + 8 * at, &value, 8);
            }
        }
    }
}

static void compare(struct engine *engine, uint32_t sequence, uint32_t layer, uint32_t block,
                    uint32_t count) {
    for (uint32_t row = layer * SEGMENTS; row < (layer + 1) * SEGMENTS; row++) {
        for (uint32_t position = 0; position < count; position++) {
            const unsigned char *from = object(engine, row, block + position);
            for (uint32_t at = 0; at < OBJECT / 8; at++) {
                uint64_t value = kv_word(sequence, position, row, at);
                if (memcmp(from + 8 * at, &value, 8) == 0) continue;
                fprintf(stderr, "wrong bytes: sequence %" PRIu32 ", block %" PRIu32 ", row %" PRIu32
                        ", byte %" PRIu32 "\n", sequence, position, row, 8 * at);
                exit(3);
            }
        }
    }
}

static void open_store(struct engine *engine, const char *path) {
    // Memory owned by the engine; the library only gets its address.
    size_t bytes = (size_t)ROWS * BLOCKS * OBJECT;
    engine->pool = calloc(1, bytes);
    if (engine->pool == NULL) exit(1);

    ripieno_namespace model = RIPIENO_NAMESPACE_INIT;
    memset(model.weights, 7, sizeof model.weights);
    model.dtype = "bfloat16";
    model.block_tokens = 16;
    model.label = "example";

    ripieno_pool pool = RIPIENO_POOL_INIT;
    pool.base = engine->pool;
    pool.bytes = bytes;
    pool.blocks = BLOCKS;

    ripieno_config config = RIPIENO_CONFIG_INIT;
    config.path = path;
    config.options = "capacity = '256MiB'\ndevices = 2";
    config.shape = (ripieno_shape){ LAYERS, SEGMENTS, OBJECT, 16 };
    config.pool = &pool;
    config.namespace_ = &model;
    check(ripieno_open(&config, &engine->store), "opening the store");
}

static void close_store(struct engine *engine) {
    check(ripieno_close(engine->store), "closing the store");
    free(engine->pool);
}

// Computes a sequence and stores it; each layer is written while the next one is computed.
static void store(struct engine *engine, uint32_t sequence, const unsigned char *keys) {
    uint32_t first = sequence % (BLOCKS / SEQUENCE) * SEQUENCE;
    uint32_t blocks[SEQUENCE];
    for (uint32_t at = 0; at < SEQUENCE; at++) blocks[at] = first + at;

    ripieno_request *request;
    size_t accepted;
    check(ripieno_store_begin(engine->store, keys, blocks, SEQUENCE, &request, &accepted),
          "storing");
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        compute(engine, sequence, layer, first);
        check(ripieno_layer_start(request, layer), "storing a layer");
    }
    // From here on it survives a crash of this process.
    check(ripieno_commit(request), "committing");
    if (accepted < SEQUENCE) {
        fprintf(stderr, "sequence %" PRIu32 ": the store has no room\n", sequence);
        exit(1);
    }
}

// Retrieves the stored blocks of a sequence and compares them. Returns their number.
static size_t retrieve(struct engine *engine, uint32_t sequence) {
    unsigned char keys[SEQUENCE * RIPIENO_KEY_BYTES];
    make_keys(sequence, keys);
    ripieno_prefix *prefix;
    check(ripieno_lookup(engine->store, keys, SEQUENCE, &prefix), "looking up");
    size_t found = ripieno_prefix_blocks(prefix);

    // Different blocks from those it was stored from.
    uint32_t first = (sequence + 1) % (BLOCKS / SEQUENCE) * SEQUENCE;
    uint32_t blocks[SEQUENCE];
    for (uint32_t at = 0; at < SEQUENCE; at++) blocks[at] = first + at;
    ripieno_request *request;
    check(ripieno_retrieve_begin(engine->store, prefix, 0, blocks, found, &request), "retrieving");
    ripieno_prefix_release(prefix);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        check(ripieno_layer_start(request, layer), "retrieving a layer");
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        // The engine would now run the layer's attention.
        check(ripieno_layer_wait(request, layer), "waiting for a layer");
        compare(engine, sequence, layer, first, (uint32_t)found);
    }
    ripieno_request_end(request);
    return found;
}

// The child: stores the missing sequences, and reports their number.
static void run(const char *path, int told) {
    struct engine engine;
    open_store(&engine, path);
    for (uint32_t sequence = 0; sequence < SEQUENCES; sequence++) {
        unsigned char keys[SEQUENCE * RIPIENO_KEY_BYTES];
        size_t found;
        make_keys(sequence, keys);
        check(ripieno_peek(engine.store, keys, SEQUENCE, &found), "looking");
        if (found < SEQUENCE) store(&engine, sequence, keys);
        uint32_t committed = sequence + 1;
        if (write(told, &committed, sizeof committed) != sizeof committed) exit(1);
    }
    // Ends when it is killed, or by SIGPIPE if the parent is gone.
    for (uint32_t all = SEQUENCES;; sleep(1)) {
        if (write(told, &all, sizeof all) != sizeof all) exit(1);
    }
}

// Runs the child until this many sequences are committed, kills it, and returns the final number.
static uint32_t run_and_kill(const char *path, uint32_t count) {
    int told[2];
    if (pipe(told) != 0) exit(1);
    // Forks before this process opens a store: a process with an open store must not fork.
    pid_t child = fork();
    if (child < 0) exit(1);
    if (child == 0) {
        close(told[0]);
        run(path, told[1]);
    }
    close(told[1]);
    uint32_t committed = 0;
    while (read(told[0], &committed, sizeof committed) == sizeof committed) {
        if (committed == count) kill(child, SIGKILL);
    }
    int status;
    waitpid(child, &status, 0);
    if (!WIFSIGNALED(status)) exit(1);
    close(told[0]);
    return committed;
}

int main(int count, char **words) {
    long wanted = count == 3 ? strtol(words[2], NULL, 10) : 0;
    if (wanted < 1 || wanted > SEQUENCES) {
        fprintf(stderr, "usage: engine HOME COUNT, which is 1 to %d\n", SEQUENCES);
        return 2;
    }
    uint32_t committed = run_and_kill(words[1], (uint32_t)wanted);
    struct engine engine;
    open_store(&engine, words[1]);
    for (uint32_t sequence = 0; sequence < committed; sequence++) {
        if (retrieve(&engine, sequence) < SEQUENCE) {
            fprintf(stderr, "sequence %" PRIu32 " was committed and is not stored\n", sequence);
            return 3;
        }
    }
    // Blocks in flight when the child was killed may be stored or not, but are never wrong.
    for (uint32_t at = 0; at < 8; at++) retrieve(&engine, committed + at);
    close_store(&engine);
    printf("killed after %ld sequences; %" PRIu32 " were committed, and are right\n", wanted,
           committed);
    return 0;
}
