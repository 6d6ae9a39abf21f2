// Blocks of an engine with a pool, and checks of calls: common to the programs of the tests.

#pragma once

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ripieno.h>

enum { LAYERS = 3, SEGMENTS = 2, ROWS = LAYERS * SEGMENTS, OBJECT = 4096 + 512, BLOCKS = 24 };
// A tensor of the pool has a gap after each object and before the next tensor.
enum { STRIDE = OBJECT + 64, TENSOR = BLOCKS * STRIDE + 100 };

static unsigned char *pool;
static int released;

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fprintf(stderr, "\n"), exit(1))
#define CHECK(what) ((what) ? (void)0 : FAIL("line %d: not %s", __LINE__, #what))
// Checks that a call returns this status, and a failure's message contains these words.
#define GIVES(status, words, call) gives(__LINE__, #call, status, words, call)
#define OK(call) GIVES(RIPIENO_STATUS_OK, "", call)
#define INVALID(words, call) GIVES(RIPIENO_STATUS_INVALID, words, call)

static void gives(int line, const char *call, int32_t wanted, const char *words, int32_t found) {
    const char *said = found == RIPIENO_STATUS_OK ? "" : ripieno_last_error();
    if (found != wanted || strstr(said, words) == NULL) {
        FAIL("line %d: %s: %s and '%s', and not %s and '%s'", line, call,
             ripieno_status_name(found), said, ripieno_status_name(wanted), words);
    }
}

static unsigned char *object(uint32_t row, uint32_t block) {
    return pool + (size_t)row * TENSOR + (size_t)block * STRIDE;
}

// Fills the object of block `number` in a row.
static unsigned char byte_of(uint32_t number, uint32_t row, uint32_t at) {
    return (unsigned char)(number * 31 + row * 7 + at + (at >> 8));
}

static void fill(uint32_t number, uint32_t block) {
    for (uint32_t row = 0; row < ROWS; row++) {
        for (uint32_t at = 0; at < OBJECT; at++) object(row, block)[at] = byte_of(number, row, at);
    }
}

static void compare(uint32_t number, uint32_t block) {
    for (uint32_t row = 0; row < ROWS; row++) {
        for (uint32_t at = 0; at < OBJECT; at++) {
            if (object(row, block)[at] == byte_of(number, row, at)) continue;
            FAIL("block %u, row %u, byte %u: wrong", number, row, at);
        }
    }
}

static unsigned char *keys(uint32_t number, uint32_t count, unsigned char *to) {
    memset(to, 0, (size_t)count * RIPIENO_KEY_BYTES);
    for (uint32_t at = 0; at < count; at++) {
        number++;
        memcpy(to + (size_t)at * RIPIENO_KEY_BYTES, &number, sizeof number);
    }
    return to;
}

static size_t peek(ripieno_store *store, uint32_t number, uint32_t count) {
    unsigned char key[BLOCKS * RIPIENO_KEY_BYTES];
    size_t found;
    OK(ripieno_peek(store, keys(number, count, key), count, &found));
    return found;
}

// Stores blocks from `number` on out of blocks from `first` on; returns the number accepted.
static size_t put(ripieno_store *store, uint32_t number, uint32_t count, uint32_t first) {
    unsigned char key[BLOCKS * RIPIENO_KEY_BYTES];
    uint32_t blocks[BLOCKS];
    for (uint32_t at = 0; at < count; at++) {
        blocks[at] = first + at;
        fill(number + at, first + at);
    }
    ripieno_request *request;
    size_t accepted;
    keys(number, count, key);
    OK(ripieno_store_begin(store, key, blocks, count, &request, &accepted));
    OK(ripieno_move_all(request));
    OK(ripieno_commit(request));
    return accepted;
}

static void release(void *context) {
    CHECK(context == &released);
    released++;
}

static ripieno_namespace tenant(const char *salt) {
    ripieno_namespace tenant = RIPIENO_NAMESPACE_INIT;
    memset(tenant.weights, 3, sizeof tenant.weights);
    tenant.dtype = "bfloat16";
    tenant.layout = "3x2";
    tenant.label = salt;
    tenant.tenant_salt = (const uint8_t *)salt;
    tenant.tenant_salt_bytes = strlen(salt);
    tenant.block_tokens = 16;
    return tenant;
}

static void test_requests(ripieno_store *store) {
    unsigned char key[8 * RIPIENO_KEY_BYTES];
    uint32_t blocks[8] = { 0, 1, 2, 3, 4, 5, 6, 7 }, same[2] = { 1, 1 }, far[1] = { BLOCKS };
    size_t accepted;
    ripieno_request *request;
    ripieno_prefix *prefix;

    keys(0, 8, key);
    INVALID("keys", ripieno_store_begin(store, NULL, blocks, 8, &request, &accepted));
    INVALID("blocks", ripieno_store_begin(store, key, NULL, 8, &request, &accepted));
    INVALID("24", ripieno_store_begin(store, key, far, 1, &request, &accepted));
    INVALID("request: it is null", ripieno_layer_start(NULL, 0));

    // An incomplete request is not committed.
    OK(ripieno_store_begin(store, key, blocks, 8, &request, &accepted));
    CHECK(accepted == 8);
    INVALID("layer", ripieno_layer_start(request, LAYERS));
    INVALID("layer", ripieno_layer_wait(request, 0));
    OK(ripieno_layer_start(request, 0));
    INVALID("layer", ripieno_commit(request));
    OK(ripieno_store_begin(store, key, blocks, 8, &request, &accepted));
    OK(ripieno_move_all(request));
    ripieno_request_end(request);
    CHECK(peek(store, 0, 8) == 0);

    CHECK(put(store, 0, 8, 0) == 8);
    CHECK(peek(store, 0, 8) == 8);
    OK(ripieno_lookup(store, key, 8, &prefix));
    CHECK(ripieno_prefix_blocks(prefix) == 8);
    INVALID("were", ripieno_retrieve_begin(store, prefix, 4, blocks, 5, &request));
    INVALID("1", ripieno_retrieve_begin(store, prefix, 0, same, 2, &request));

    // Five of the eight, layer by layer, into other blocks.
    for (uint32_t at = 0; at < 5; at++) blocks[at] = 20 - at;
    OK(ripieno_retrieve_begin(store, prefix, 3, blocks, 5, &request));
    ripieno_prefix_release(prefix);
    for (uint32_t layer = 0; layer < LAYERS; layer++) OK(ripieno_layer_start(request, layer));
    for (bool done = false; !done;) OK(ripieno_layer_poll(request, LAYERS - 1, &done));
    for (uint32_t layer = 0; layer + 1 < LAYERS; layer++) OK(ripieno_layer_wait(request, layer));
    for (uint32_t at = 0; at < 5; at++) compare(3 + at, 20 - at);
    INVALID("commit", ripieno_commit(request));
}

// A forked process has none of the library's threads. Every call there fails at once, and releasing
// handles leaves the parent's alone.
static void test_fork(ripieno_store *store) {
    unsigned char key[8 * RIPIENO_KEY_BYTES], more[2 * RIPIENO_KEY_BYTES];
    uint32_t blocks[2] = { 16, 17 }, into[2] = { 18, 19 }, removed;
    size_t found;
    bool done, each[2];
    ripieno_prefix *prefix;
    ripieno_request *load, *save, *lost;
    OK(ripieno_lookup(store, keys(0, 2, key), 2, &prefix));
    OK(ripieno_retrieve_begin(store, prefix, 0, into, 2, &load));
    fill(80, 16);
    fill(81, 17);
    OK(ripieno_store_begin(store, keys(80, 2, more), blocks, 2, &save, &found));
    OK(ripieno_layer_start(save, 0));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        // Kills a child that waits.
        alarm(600);
        ripieno_store *other;
        ripieno_namespace space = tenant("third");
        ripieno_usage usage = RIPIENO_USAGE_INIT;
        uint64_t number;
#define FORKED(call) GIVES(RIPIENO_STATUS_FAILED, "fork", call)
        FORKED(ripieno_peek(store, key, 2, &found));
        FORKED(ripieno_lookup(store, key, 2, &prefix));
        FORKED(ripieno_are_stored(store, key, 2, each));
        FORKED(ripieno_load(store, key, into, 2, each));
        FORKED(ripieno_save(store, key, into, 2, &found));
        FORKED(ripieno_prefetch(store, key, 2, 10, &found));
        FORKED(ripieno_within(store, &space, &other));
        FORKED(ripieno_retrieve_begin(store, prefix, 0, into, 2, &lost));
        FORKED(ripieno_store_begin(store, key, blocks, 2, &lost, &found));
        FORKED(ripieno_pin_for(store, key, 2, 60, &number, &found));
        FORKED(ripieno_pin_end(store, 1));
        FORKED(ripieno_remove(store, key, 2, &removed));
        FORKED(ripieno_sync(store));
        FORKED(ripieno_get_usage(store, &usage));
        FORKED(ripieno_poll_events(store, &number));
        FORKED(ripieno_layer_start(load, 0));
        FORKED(ripieno_layer_wait(save, 0));
        FORKED(ripieno_layer_poll(save, 0, &done));
        FORKED(ripieno_move_all(load));
        CHECK(ripieno_prefix_blocks(prefix) == 0);
        FORKED(ripieno_commit(save));
        ripieno_request_end(load);
        ripieno_prefix_release(prefix);
        FORKED(ripieno_close(store));
        CHECK(released == 0);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    OK(ripieno_move_all(load));
    compare(0, 18);
    compare(1, 19);
    ripieno_request_end(load);
    ripieno_prefix_release(prefix);
    OK(ripieno_layer_wait(save, 0));
    for (uint32_t layer = 1; layer < LAYERS; layer++) OK(ripieno_layer_start(save, layer));
    for (uint32_t layer = 1; layer < LAYERS; layer++) OK(ripieno_layer_wait(save, layer));
    OK(ripieno_commit(save));
    CHECK(peek(store, 80, 2) == 2);
    OK(ripieno_remove(store, more, 2, &removed));
    CHECK(removed == 2);
}

static void *thread(void *handle) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static uint32_t threads;
    pthread_mutex_lock(&mutex);
    uint32_t number = threads++;
    pthread_mutex_unlock(&mutex);
    // No call of this thread has failed.
    CHECK(strcmp(ripieno_last_error(), "") == 0);
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t first = 1000 + (number * 20 + round) * 4, blocks[4];
        unsigned char key[4 * RIPIENO_KEY_BYTES];
        CHECK(put(handle, first, 4, number * 8) == 4);
        for (uint32_t at = 0; at < 4; at++) blocks[at] = number * 8 + 4 + at;
        ripieno_prefix *prefix;
        ripieno_request *request;
        OK(ripieno_lookup(handle, keys(first, 4, key), 4, &prefix));
        OK(ripieno_retrieve_begin(handle, prefix, 0, blocks, 4, &request));
        OK(ripieno_move_all(request));
        for (uint32_t at = 0; at < 4; at++) compare(first + at, blocks[at]);
        ripieno_request_end(request);
        ripieno_prefix_release(prefix);
    }
    return NULL;
}

// Three threads store and retrieve blocks from number 1000 on.
static void run_threads(ripieno_store *store) {
    pthread_t threads[3];
    for (int at = 0; at < 3; at++) CHECK(pthread_create(&threads[at], NULL, thread, store) == 0);
    for (int at = 0; at < 3; at++) CHECK(pthread_join(threads[at], NULL) == 0);
}
