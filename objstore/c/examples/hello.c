// Stores a KV block in a directory, and finds it when it is run again: hello DIRECTORY
#include <stdio.h>
#include <stdlib.h>
#include <ripieno.h>

enum { LAYERS = 4, SEGMENTS = 2, BLOCKS = 64, OBJECT = 8192 };
static unsigned char kv[LAYERS * SEGMENTS][BLOCKS][OBJECT]; // the engine's memory

static void check(ripieno_status status) {
    if (status == RIPIENO_STATUS_OK) return;
    fprintf(stderr, "%s: %s\n", ripieno_status_name(status), ripieno_last_error());
    exit(1);
}

int main(int count, char **words) {
    ripieno_pool pool = { .size = sizeof pool, .base = kv, .bytes = sizeof kv, .blocks = BLOCKS };
    ripieno_config config = { .size = sizeof config, .path = count > 1 ? words[1] : "hello-store",
                              .options = "capacity = '64MiB'", .pool = &pool,
                              .shape = { LAYERS, SEGMENTS, OBJECT, .block_tokens = 16 } };
    ripieno_store *store;
    check(ripieno_open(&config, &store));
    uint8_t key[RIPIENO_KEY_BYTES] = { 7 }; // an engine has a digest of the tokens here
    uint32_t block = 5;
    bool found;
    size_t accepted;
    check(ripieno_load(store, key, &block, 1, &found));
    for (int at = 0; at < LAYERS * SEGMENTS * OBJECT; at++) {
        unsigned char *byte = &kv[at / OBJECT][block][at % OBJECT];
        if (found && *byte != at % 251) return puts("wrong bytes"), 3;
        *byte = at % 251;
    }
    if (!found) check(ripieno_save(store, key, &block, 1, &accepted));
    puts(found ? "found" : "stored; run it again");
    check(ripieno_close(store));
}
