// A store of a server, which is killed meanwhile: `served SOCKET PID`. Another server follows.

#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "blocks.h"

enum { PAGES = 512 << 10, SECONDS = 60 };

// Shared memory of two clients.
static struct client {
    unsigned char *base;
    int file;
} one, other;

static struct client make(unsigned seals) {
    struct client made = { .file = memfd_create("blocks", MFD_CLOEXEC | MFD_ALLOW_SEALING) };
    size_t bytes = ((size_t)ROWS * TENSOR + PAGES - 1) / PAGES * PAGES;
    CHECK(made.file > 0 && ftruncate(made.file, (off_t)bytes) == 0);
    CHECK(seals == 0 || fcntl(made.file, F_ADD_SEALS, seals) == 0);
    made.base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made.file, 0);
    CHECK(made.base != MAP_FAILED);
    return made;
}

static const char *path;

// Connects a client, after `change` modified the configuration.
static int32_t connect_with(struct client client,
                            void (*change)(ripieno_config *, ripieno_pool *),
                            ripieno_store **store) {
    uint64_t rows[ROWS];
    for (uint64_t row = 0; row < ROWS; row++) rows[row] = row * TENSOR;
    ripieno_namespace first = tenant("first");
    ripieno_pool memory = RIPIENO_POOL_INIT;
    memory.base = client.base;
    memory.bytes = ((size_t)ROWS * TENSOR + PAGES - 1) / PAGES * PAGES;
    memory.rows = rows;
    memory.rows_count = ROWS;
    memory.block_stride = STRIDE;
    memory.blocks = BLOCKS;
    memory.file = client.file;
    memory.release = release;
    memory.release_context = &released;
    ripieno_config config = RIPIENO_CONFIG_INIT;
    config.server = path;
    config.shape = (ripieno_shape){ LAYERS, SEGMENTS, OBJECT, 16 };
    config.pool = &memory;
    config.namespace_ = &first;
    if (change != NULL) change(&config, &memory);
    return ripieno_open(&config, store);
}

static void a_path(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->path = "home";
}
static void a_cache(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->options = "dram = '1MiB'";
}
static void no_server(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->server = "absent";
}
static void other_shape(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->shape.block_tokens = 32;
}
static void no_file(ripieno_config *config, ripieno_pool *memory) {
    (void)config;
    memory->file = 0;
}
static void another_file(ripieno_config *config, ripieno_pool *memory) {
    (void)config;
    memory->file = other.file;
}
static void far_rows(ripieno_config *config, ripieno_pool *memory) {
    (void)config;
    memory->blocks *= 2;
}

static void test_open(void) {
    ripieno_store *store = NULL;
    struct client unsealed = make(0);
    INVALID("config.server", connect_with(one, a_path, &store));
    INVALID("config.server", connect_with(one, a_cache, &store));
    INVALID("memfd_create", connect_with(one, no_file, &store));
    INVALID("F_SEAL_SHRINK", connect_with(unsealed, NULL, &store));
    INVALID("other memory", connect_with(one, another_file, &store));
    INVALID("pool", connect_with(one, far_rows, &store));
    GIVES(RIPIENO_STATUS_DAMAGED, "16 tokens a block)", connect_with(one, other_shape, &store));
    GIVES(RIPIENO_STATUS_NOT_FOUND, "absent", connect_with(one, no_server, &store));
    CHECK(store == NULL && released == 8);
    released = 0;
}

// Calls that are the server's own.
static void test_unsupported(ripieno_store *store) {
    unsigned char key[8 * RIPIENO_KEY_BYTES];
    uint32_t found;
    uint64_t epoch, events = 7;
    size_t cached = 7;
    double value;
    keys(0, 8, key);
#define UNSUPPORTED(call) GIVES(RIPIENO_STATUS_UNSUPPORTED, "ripieno ctl", call)
    UNSUPPORTED(ripieno_evict(store, 8, &found));
    UNSUPPORTED(ripieno_clear(store));
    UNSUPPORTED(ripieno_bump_epoch(store, &epoch));
    UNSUPPORTED(ripieno_set_quota(store, 8));
    UNSUPPORTED(ripieno_set_weight(store, 8));
    UNSUPPORTED(ripieno_get_stat(store, "lookups_total", &value));
    OK(ripieno_prefetch(store, key, 8, 1000, &cached));
    OK(ripieno_poll_events(store, &events));
    OK(ripieno_sync(store));
    CHECK(cached == 0 && events == 0 && peek(store, 0, 8) == 8);
}

// Pins of a client end with it.
static void test_pins(ripieno_store *store, ripieno_store *second) {
    unsigned char key[8 * RIPIENO_KEY_BYTES];
    uint64_t pin, of_second;
    size_t found;
    ripieno_usage usage = RIPIENO_USAGE_INIT;
    OK(ripieno_pin_for(store, keys(0, 8, key), 8, 60, &pin, &found));
    CHECK(pin != 0 && found == 8);
    OK(ripieno_pin_for(second, key, 3, 60, &of_second, &found));
    CHECK(found == 3);
    OK(ripieno_get_usage(store, &usage));
    CHECK(usage.evictable == 0);
    OK(ripieno_pin_end(store, pin));
    OK(ripieno_pin_end(store, pin));
    // It is not this client's.
    OK(ripieno_pin_end(store, of_second));
    OK(ripieno_get_usage(store, &usage));
    CHECK(usage.evictable == 5);
    OK(ripieno_pin_end(second, of_second));
    OK(ripieno_get_usage(store, &usage));
    CHECK(usage.evictable == 8);
    OK(ripieno_pin_for(store, keys(99, 1, key), 1, 60, &pin, &found));
    CHECK(pin == 0 && found == 0);
}

// The second client finds what the first has stored, in the same namespace.
static void test_sharing(ripieno_store *first, ripieno_store *second) {
    unsigned char key[8 * RIPIENO_KEY_BYTES];
    uint32_t blocks[8] = { 8, 9, 10, 11, 12, 13, 14, 15 };
    uint32_t removed;
    bool each[8];
    pool = other.base;
    OK(ripieno_load(second, keys(0, 8, key), blocks, 8, each));
    for (uint32_t at = 0; at < 8; at++) {
        CHECK(each[at]);
        compare(at, blocks[at]);
    }
    CHECK(put(second, 100, 4, 0) == 4 && peek(first, 100, 4) == 4);

    ripieno_namespace space = tenant("second");
    ripieno_store *apart;
    OK(ripieno_within(second, &space, &apart));
    CHECK(peek(apart, 0, 8) == 0 && put(apart, 0, 3, 0) == 3);
    OK(ripieno_remove(apart, keys(2, 2, key), 2, &removed));
    CHECK(removed == 1 && peek(apart, 0, 3) == 2);
    CHECK(put(apart, 3, 1, 3) == 1);
    OK(ripieno_are_stored(apart, keys(1, 4, key), 4, each));
    CHECK(each[0] && !each[1] && each[2] && !each[3]);
    fill(9, blocks[1]);
    OK(ripieno_load(apart, key, blocks, 4, each));
    CHECK(each[0] && !each[1] && each[2] && !each[3]);
    for (uint32_t at = 0; at < 3; at++) compare(at == 1 ? 9 : 1 + at, blocks[at]);
    OK(ripieno_remove(apart, keys(3, 1, key), 1, &removed));
    OK(ripieno_sync(apart));
    keys(0, 8, key);
    ripieno_usage usage = RIPIENO_USAGE_INIT;
    OK(ripieno_get_usage(apart, &usage));
    CHECK(usage.stored == 2 && usage.committed == 4 && usage.quota == UINT32_MAX);
    OK(ripieno_close(apart));
    CHECK(released == 0);

    // Handles of one client are nothing to another.
    ripieno_prefix *prefix;
    ripieno_request *request;
    OK(ripieno_lookup(first, key, 8, &prefix));
    INVALID("prefix", ripieno_retrieve_begin(second, prefix, 0, blocks, 8, &request));
    OK(ripieno_retrieve_begin(first, prefix, 0, blocks, 8, &request));
    ripieno_prefix_release(prefix);
    OK(ripieno_move_all(request));
    ripieno_request_end(request);

    // A handle that is left is only released.
    OK(ripieno_lookup(second, key, 8, &prefix));
    OK(ripieno_retrieve_begin(second, prefix, 0, blocks, 8, &request));
    OK(ripieno_layer_start(request, 0));
    OK(ripieno_close(second));
    CHECK(released == 1);
    GIVES(RIPIENO_STATUS_FAILED, "closed", ripieno_layer_start(request, 1));
    ripieno_request_end(request);
    ripieno_prefix_release(prefix);
    released = 0;
}

static void a_moment(void) {
    nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

// The server is killed, and another one has its store.
static void test_death(ripieno_store *store, pid_t server) {
    unsigned char key[8 * RIPIENO_KEY_BYTES];
    uint32_t blocks[8] = { 8, 9, 10, 11, 12, 13, 14, 15 };
    uint64_t events;
    size_t found;
    bool each[8];
    ripieno_prefix *prefix;
    ripieno_request *request;
    OK(ripieno_lookup(store, keys(0, 8, key), 8, &prefix));
    OK(ripieno_retrieve_begin(store, prefix, 0, blocks, 8, &request));
    OK(ripieno_layer_start(request, 0));
    CHECK(kill(server, SIGKILL) == 0);
    time_t until = time(NULL) + SECONDS;
    while (ripieno_poll_events(store, &events) == RIPIENO_STATUS_OK) {
        CHECK(time(NULL) < until);
        a_moment();
    }
#define LOST(call) GIVES(RIPIENO_STATUS_FAILED, "lost", call)
    LOST(ripieno_layer_wait(request, 0));
    LOST(ripieno_layer_start(request, 1));
    LOST(ripieno_peek(store, key, 8, &found));
    LOST(ripieno_are_stored(store, key, 8, each));
    LOST(ripieno_pin_for(store, key, 8, 60, &events, &found));
    LOST(ripieno_save(store, key, blocks, 8, &found));
    ripieno_request_end(request);
    ripieno_prefix_release(prefix);
    LOST(ripieno_close(store));
    CHECK(released == 0);

    // No server is there, or the one that ends still has its socket.
    int32_t status;
    while ((status = connect_with(one, NULL, &store)) != RIPIENO_STATUS_OK) {
        CHECK(status == RIPIENO_STATUS_NOT_FOUND || status == RIPIENO_STATUS_FAILED);
        CHECK(time(NULL) < until);
        a_moment();
    }
    released = 0;
    OK(ripieno_load(store, key, blocks, 8, each));
    for (uint32_t at = 0; at < 8; at++) {
        CHECK(each[at]);
        compare(at, blocks[at]);
    }
    CHECK(peek(store, 100, 4) == 4);
    OK(ripieno_close(store));
    CHECK(released == 1);
}

int main(int count, char **words) {
    CHECK(count == 3);
    path = words[1];
    // The library must not rely on this.
    CHECK(signal(SIGPIPE, SIG_DFL) != SIG_ERR);
    one = make(F_SEAL_SHRINK);
    other = make(F_SEAL_SHRINK);
    pool = one.base;
    ripieno_store *first, *second;
    test_open();
    OK(connect_with(one, NULL, &first));
    OK(connect_with(other, NULL, &second));
    test_requests(first);
    test_fork(first);
    test_unsupported(first);
    test_pins(first, second);
    test_sharing(first, second);
    pool = one.base;
    run_threads(first);
    test_death(first, (pid_t)strtol(words[2], NULL, 10));
    return 0;
}
