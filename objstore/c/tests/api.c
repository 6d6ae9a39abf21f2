// Calls every function of ripieno.h, with valid and with invalid arguments: `api HOME`.

#include <time.h>

#include "blocks.h"

// Opens the store, after `change` modified the configuration.
static int32_t open_with(const char *home, void (*change)(ripieno_config *, ripieno_pool *),
                         ripieno_store **store) {
    uint64_t rows[ROWS];
    for (uint64_t row = 0; row < ROWS; row++) rows[row] = row * TENSOR;
    ripieno_namespace first = tenant("first");
    ripieno_pool memory = RIPIENO_POOL_INIT;
    memory.base = pool;
    memory.bytes = (size_t)ROWS * TENSOR;
    memory.rows = rows;
    memory.rows_count = ROWS;
    memory.block_stride = STRIDE;
    memory.blocks = BLOCKS;
    memory.release = release;
    memory.release_context = &released;
    ripieno_config config = RIPIENO_CONFIG_INIT;
    config.path = home;
    config.options = "capacity = '64MiB'\ndevices = 2";
    config.shape = (ripieno_shape){ LAYERS, SEGMENTS, OBJECT, 16 };
    config.pool = &memory;
    config.namespace_ = &first;
    if (change != NULL) change(&config, &memory);
    return ripieno_open(&config, store);
}

static void no_create(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->options = NULL;
}
static void bad_option(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->options = "capacity = '64MiB'\ndram_bytes = 1";
}
static void no_home(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->path = NULL;
}
static void no_pool(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->pool = NULL;
}
static void no_size(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->size = 0;
}
static void no_base(ripieno_config *config, ripieno_pool *memory) {
    (void)config;
    memory->base = NULL;
}
static void short_pool(ripieno_config *config, ripieno_pool *memory) {
    (void)config;
    memory->bytes -= 200;
}
static void few_rows(ripieno_config *config, ripieno_pool *memory) {
    (void)config;
    memory->rows_count--;
}
static void more_layers(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->shape.layers++;
}
static void no_layers(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->shape.layers = 0;
}
static void small_disk(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->options = "capacity = 4096";
}
static void small_store(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->options = "capacity = '2MiB'";
}
static void other_shape(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->shape.block_tokens = 32;
}

static void test_open(const char *home) {
    ripieno_store *store = NULL;
    released = 0;
    INVALID("config: it is null", ripieno_open(NULL, &store));
    INVALID("store: it is null", open_with(home, NULL, NULL));
    INVALID("sizeof", open_with(home, no_size, &store));
    INVALID("config.pool", open_with(home, no_pool, &store));
    CHECK(released == 0);
    INVALID("base", open_with(home, no_base, &store));
    INVALID("path: it is missing", open_with(home, no_home, &store));
    INVALID("config.options: dram_bytes: there is no such option; its name is dram",
            open_with(home, bad_option, &store));
    INVALID("layers", open_with(home, no_layers, &store));
    GIVES(RIPIENO_STATUS_NOT_FOUND, home, open_with(home, no_create, &store));
    CHECK(released == 5);
    INVALID("4 KiB are too few", open_with(home, small_disk, &store));
    INVALID("needs", open_with(home, small_store, &store));
    INVALID("pool", open_with(home, short_pool, &store));
    INVALID("rows", open_with(home, few_rows, &store));
    INVALID("rows", open_with(home, more_layers, &store));
    CHECK(released == 10);
    CHECK(store == NULL);
    OK(ripieno_close(NULL));
    ripieno_prefix_release(NULL);
    ripieno_request_end(NULL);
    CHECK(ripieno_prefix_blocks(NULL) == 0);
    CHECK(ripieno_version() == RIPIENO_VERSION);
    released = 0;
}

static void test_names(void) {
    // SHA-256 of "abc" (FIPS 180-4) begins and ends so.
    unsigned char key[RIPIENO_KEY_BYTES], other[RIPIENO_KEY_BYTES];
    OK(ripieno_key_of_name((const uint8_t *)"abc", 3, key));
    CHECK(key[0] == 0xba && key[1] == 0x78 && key[30] == 0x15 && key[31] == 0xad);
    OK(ripieno_key_of_name(NULL, 0, other));
    CHECK(memcmp(key, other, sizeof key) != 0);
    INVALID("name", ripieno_key_of_name(NULL, 3, key));
    INVALID("key: it is null", ripieno_key_of_name((const uint8_t *)"abc", 3, NULL));
}

static void test_namespaces(ripieno_store *store) {
    ripieno_namespace second = tenant("second");
    ripieno_store *other;
    INVALID("namespace: it is null", ripieno_within(store, NULL, &other));
    OK(ripieno_within(store, &second, &other));
    CHECK(peek(other, 0, 8) == 0);
    CHECK(put(other, 0, 4, 8) == 4);
    ripieno_usage usage = RIPIENO_USAGE_INIT;
    OK(ripieno_get_usage(other, &usage));
    CHECK(usage.stored == 4 && usage.committed == 4 && usage.quota == UINT32_MAX);
    OK(ripieno_get_usage(store, &usage));
    CHECK(usage.stored == 8);

    OK(ripieno_set_quota(other, 6));
    put(other, 100, 8, 8);
    OK(ripieno_get_usage(other, &usage));
    CHECK(usage.stored <= 6 && usage.quota == 6);
    OK(ripieno_set_quota(other, UINT32_MAX));
    OK(ripieno_set_weight(other, 2));
    INVALID("weight", ripieno_set_weight(other, 0));

    OK(ripieno_clear(other));
    CHECK(peek(other, 0, 4) == 0 && peek(store, 0, 8) == 8);
    put(other, 0, 4, 8);
    uint64_t epoch;
    OK(ripieno_bump_epoch(other, &epoch));
    CHECK(epoch == 1 && peek(other, 0, 4) == 0);
    OK(ripieno_close(other));
    CHECK(released == 0);
}

static void test_eviction(ripieno_store *store) {
    unsigned char key[RIPIENO_KEY_BYTES];
    uint32_t found, evicted;
    OK(ripieno_remove(store, keys(0, 1, key), 1, &found));
    CHECK(found == 1 && peek(store, 0, 1) == 0);
    OK(ripieno_evict(store, 100, &evicted));
    CHECK(evicted == 7);
    OK(ripieno_sync(store));
    ripieno_usage usage = RIPIENO_USAGE_INIT;
    OK(ripieno_get_usage(store, &usage));
    CHECK(usage.stored == 0 && usage.evictable == 0);
}

static void test_pins(ripieno_store *store) {
    unsigned char key[16 * RIPIENO_KEY_BYTES];
    uint64_t pin, second;
    uint32_t evicted;
    size_t found;
    CHECK(put(store, 40, 8, 8) == 8);
    keys(40, 9, key);
    INVALID("seconds", ripieno_pin_for(store, key, 9, 0, &pin, &found));
    INVALID("pin", ripieno_pin_for(store, key, 9, 60, NULL, &found));
    INVALID("found", ripieno_pin_for(store, key, 9, 60, &pin, NULL));
    OK(ripieno_pin_for(store, key, 9, 60, &pin, &found));
    CHECK(pin != 0 && found == 8);
    OK(ripieno_pin_for(store, key, 2, UINT32_MAX, &second, &found));
    CHECK(second != pin && found == 2);
    OK(ripieno_evict(store, 100, &evicted));
    CHECK(peek(store, 40, 8) == 8);
    OK(ripieno_pin_end(store, pin));
    OK(ripieno_pin_end(store, pin));
    OK(ripieno_evict(store, 100, &evicted));
    CHECK(evicted == 6 && peek(store, 40, 8) == 2);
    OK(ripieno_pin_for(store, keys(99, 1, key), 1, 60, &pin, &found));
    CHECK(pin == 0 && found == 0);
    OK(ripieno_pin_end(store, pin));
    OK(ripieno_pin_end(store, second));
    OK(ripieno_evict(store, 100, &evicted));
    CHECK(peek(store, 40, 8) == 0);
}

static double stat(ripieno_store *store, const char *name) {
    double value = -1;
    OK(ripieno_get_stat(store, name, &value));
    return value;
}

static void test_threads(ripieno_store *store) {
    run_threads(store);
    double value = 7;
    CHECK(stat(store, "used_blocks") == 240 && stat(store, "evicted_blocks_total") >= 7);
    CHECK(stat(store, "recoveries_total") == 0 && stat(store, "bounced") == 0);
    CHECK(stat(store, "flush_seconds_sum") >= 0);
    CHECK(stat(store, "device_commands_total{device=\"0\"}") > 0);
    INVALID("is it \"used_blocks\"?", ripieno_get_stat(store, "used_block", &value));
    INVALID("no \"\"", ripieno_get_stat(store, NULL, &value));
    INVALID("value", ripieno_get_stat(store, "used_blocks", NULL));
    CHECK(value == 7);
    uint64_t events = 7;
    OK(ripieno_poll_events(store, &events));
    CHECK(events == 0);
    INVALID("events", ripieno_poll_events(store, NULL));
}

static void test_whole_blocks(ripieno_store *store) {
    unsigned char key[4 * RIPIENO_KEY_BYTES];
    uint32_t from[3] = { 0, 1, 2 }, to[4] = { 8, 9, 10, 11 }, far[1] = { BLOCKS };
    size_t moved;
    uint32_t removed;
    bool found[4] = { 0 };
    for (uint32_t at = 0; at < 3; at++) fill(2000 + at, from[at]);
    OK(ripieno_save(store, keys(2000, 3, key), from, 3, &moved));
    CHECK(moved == 3 && peek(store, 2000, 4) == 3);
    fill(0, 11);
    OK(ripieno_load(store, keys(2000, 4, key), to, 4, found));
    CHECK(found[0] && found[1] && found[2] && !found[3]);
    for (uint32_t at = 0; at < 3; at++) compare(2000 + at, to[at]);
    compare(0, 11);
    OK(ripieno_load(store, keys(3000, 1, key), to, 1, found));
    CHECK(!found[0]);
    // A key that is not stored hides none behind it.
    for (uint32_t at = 0; at < 3; at++) fill(0, to[at]);
    OK(ripieno_remove(store, keys(2001, 1, key), 1, &removed));
    OK(ripieno_are_stored(store, keys(2000, 4, key), 4, found));
    CHECK(found[0] && !found[1] && found[2] && !found[3]);
    memset(found, 1, sizeof found);
    OK(ripieno_load(store, key, to, 4, found));
    CHECK(found[0] && !found[1] && found[2] && !found[3]);
    for (uint32_t at = 0; at < 3; at++) compare(at == 1 ? 0 : 2000 + at, to[at]);
    INVALID("24", ripieno_save(store, key, far, 1, &moved));
    INVALID("keys", ripieno_save(store, NULL, from, 1, &moved));
    INVALID("accepted: it is null", ripieno_save(store, key, from, 1, NULL));
    INVALID("24", ripieno_load(store, keys(2000, 1, key), far, 1, found));
    INVALID("keys", ripieno_are_stored(store, NULL, 1, found));
    INVALID("stored: it is null", ripieno_are_stored(store, key, 1, NULL));
    INVALID("found: it is null", ripieno_load(store, key, to, 1, NULL));
}

static void test_close(const char *home, ripieno_store *store) {
    ripieno_store *again;
    unsigned char key[4 * RIPIENO_KEY_BYTES];
    uint32_t blocks[4] = { 0, 1, 2, 3 };
    GIVES(RIPIENO_STATUS_LOCKED, home, open_with(home, NULL, &again));
    CHECK(released == 1);
    released = 0;
    ripieno_prefix *prefix;
    ripieno_request *request;
    OK(ripieno_lookup(store, keys(1000, 4, key), 4, &prefix));
    OK(ripieno_retrieve_begin(store, prefix, 0, blocks, 4, &request));
    OK(ripieno_layer_start(request, 0));
    OK(ripieno_close(store));
    CHECK(released == 1);
    GIVES(RIPIENO_STATUS_FAILED, "closed", ripieno_layer_start(request, 1));
    ripieno_request_end(request);
    ripieno_prefix_release(prefix);

    GIVES(RIPIENO_STATUS_DAMAGED, "16", open_with(home, other_shape, &again));
    CHECK(released == 2);
    OK(open_with(home, NULL, &again));
    CHECK(peek(again, 1000, 4) == 4);
    test_whole_blocks(again);
    OK(ripieno_close(again));
    CHECK(released == 3);
}

static void with_dram(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    static char options[128];
    snprintf(options, sizeof options, "capacity = '64MiB'\ndevices = 2\npacing = true\ndram = %d",
             8 * ROWS * OBJECT);
    config->options = options;
}

static void reading_ahead(ripieno_config *config, ripieno_pool *memory) {
    static char options[128];
    with_dram(config, memory);
    snprintf(options, sizeof options, "%s\ndram_mode = 'read-ahead'", config->options);
    config->options = options;
}

static void no_such_mode(ripieno_config *config, ripieno_pool *memory) {
    (void)memory;
    config->options = "dram = '1MiB'\ndram_mode = 77";
}

// Stored blocks are copied from the cache, not read.
static void test_dram(const char *home) {
    ripieno_store *store;
    OK(open_with(home, with_dram, &store));
    CHECK(put(store, 500, 3, 0) == 3);
    unsigned char key[3 * RIPIENO_KEY_BYTES], more[4 * RIPIENO_KEY_BYTES];
    uint32_t blocks[3] = { 8, 9, 10 };
    ripieno_prefix *prefix;
    ripieno_request *request;
    OK(ripieno_lookup(store, keys(500, 3, key), 3, &prefix));
    OK(ripieno_retrieve_begin(store, prefix, 0, blocks, 3, &request));
    ripieno_prefix_release(prefix);
    OK(ripieno_move_all(request));
    ripieno_request_end(request);
    for (uint32_t at = 0; at < 3; at++) compare(500 + at, 8 + at);
    CHECK(stat(store, "dram_hit_blocks_total") == 3 && stat(store, "dram_miss_blocks_total") == 0);
    CHECK(stat(store, "dram_loaded_bytes_total") == 3 * ROWS * OBJECT);
    CHECK(stat(store, "read_bytes_total") == 0 && stat(store, "dram_used_blocks") == 3);
    CHECK(stat(store, "dram_evicted_blocks_total") == 0);

    // Prefetches blocks that were evicted.
    CHECK(put(store, 600, 8, 0) == 8);
    size_t found;
    OK(ripieno_prefetch(store, keys(500, 4, more), 4, 60000, &found));
    CHECK(found == 3);
    OK(ripieno_prefetch(store, keys(700, 1, more), 1, 60000, &found));
    CHECK(found == 0);
    INVALID("keys", ripieno_prefetch(store, NULL, 1, 0, &found));
    for (int at = 0; at < 5000 && stat(store, "dram_prefetched_bytes_total") == 0; at++)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    CHECK(stat(store, "dram_prefetched_bytes_total") == 3 * ROWS * OBJECT);
    CHECK(stat(store, "dram_wasted_bytes_total") == 0);
    OK(ripieno_close(store));

    INVALID("give write-through or read-ahead", open_with(home, no_such_mode, &store));
    OK(open_with(home, reading_ahead, &store));
    CHECK(put(store, 800, 3, 0) == 3);
    CHECK(stat(store, "dram_used_blocks") == 0);
    OK(ripieno_close(store));
}

int main(int count, char **words) {
    CHECK(count == 2);
    // An odd address.
    unsigned char *memory = malloc((size_t)ROWS * TENSOR + 1);
    CHECK(memory != NULL);
    pool = memory + 1;
    ripieno_store *store;
    test_names();
    test_open(words[1]);
    OK(open_with(words[1], NULL, &store));
    test_requests(store);
    test_fork(store);
    test_namespaces(store);
    test_eviction(store);
    test_pins(store);
    test_threads(store);
    test_close(words[1], store);
    test_dram(words[1]);
    free(memory);
    return 0;
}
