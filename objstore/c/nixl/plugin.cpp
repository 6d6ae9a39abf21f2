// A NIXL backend: objects of one size, in a store of Ripieno. See docs/start/nixl.md.
//
// Architecture: NIXL's threads queue transfers; one thread moves them, through a buffer that is the
// store's pool, in batches of half of it: one half is copied while the other one is moved.

#include "abi.h"

#include <ripieno.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <string_view>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

using Key = std::array<uint8_t, RIPIENO_KEY_BYTES>;

constexpr size_t PAGE = 4096;

void say(const std::string &text) { std::fprintf(stderr, "ripieno: NIXL: %s\n", text.c_str()); }

// A failed call of the store.
struct Failure {
    ripieno_status status;
    std::string why = ripieno_last_error();

    nixl::Status nixl() const {
        return status == RIPIENO_STATUS_STALE ? nixl::ERR_NOT_FOUND : nixl::ERR_BACKEND;
    }
};

void check(ripieno_status status) {
    if (status != RIPIENO_STATUS_OK) throw Failure{status};
}

// Owns a handle of the store.
template <auto release> struct Release {
    void operator()(auto *handle) const { release(handle); }
};
using Prefix = std::unique_ptr<ripieno_prefix, Release<ripieno_prefix_release>>;
using StoreRequest = std::unique_ptr<ripieno_request, Release<ripieno_request_end>>;

// Parameters of the backend.
struct Options {
    std::string path;
    std::string server;
    // TOML, of the library.
    std::string store;
    uint64_t object_bytes = 0;
    uint64_t buffer = 64 << 20;

    // Throws std::invalid_argument if a parameter is missing, unknown or wrong.
    explicit Options(const nixl::Params &given) {
        for (const auto &[name, value] : given) {
            if (name == "path") path = value;
            else if (name == "server") server = value;
            else if (name == "object_bytes") object_bytes = size(name, value);
            else if (name == "buffer") buffer = size(name, value);
            else store += quoted(name) + " = " + quoted(value) + "\n";
        }
        if (!server.empty() && (!path.empty() || !store.empty())) {
            throw std::invalid_argument(
                "server was given with path or options of a store: leave out these, because the "
                "server has the store:\n" + store);
        }
        if ((server.empty() && (path.empty() || !given.contains("capacity"))) ||
            object_bytes == 0) {
            throw std::invalid_argument(
                "path, capacity and object_bytes must be given, or server and object_bytes");
        }
        if (object_bytes > UINT32_MAX || buffer / object_bytes < 2) {
            throw std::invalid_argument(
                "a buffer of " + std::to_string(buffer) + " bytes was given; it must have room for "
                "2 objects of " + std::to_string(object_bytes) + " bytes, and objects are below "
                "4 GiB: give a larger buffer or smaller objects");
        }
    }

    // Returns text as TOML has it.
    static std::string quoted(const std::string &text) {
        std::string result = "\"";
        for (const char each : text) {
            if (each == '"' || each == '\\') result += '\\';
            result += each;
        }
        return result + '"';
    }

    // Returns a number such as 4096, "64KiB" or "100GiB".
    static uint64_t size(const std::string &name, const std::string &text) {
        uint64_t number = 0;
        const char *end = text.data() + text.size();
        const auto [rest, error] = std::from_chars(text.data(), end, number);
        constexpr std::string_view units[] = {"", "KiB", "MiB", "GiB", "TiB"};
        const auto unit = std::ranges::find(units, std::string_view(rest, end));
        const auto shift = 10 * (unit - std::begin(units));
        if (error != std::errc() || unit == std::end(units) || number > UINT64_MAX >> shift) {
            throw std::invalid_argument(
                name + ": " + text + " was given; give a number of bytes such as 100GiB");
        }
        return number << shift;
    }
};

// Memory that a server can share: it is unmapped without harm while the server still has it.
class Shared {
  public:
    explicit Shared(size_t length) : length(length) {
        file = memfd_create("ripieno-nixl", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (file < 0 || ftruncate(file, static_cast<off_t>(length)) != 0 ||
            fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) != 0)
            fail();
        base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (base == MAP_FAILED) fail();
    }
    Shared(const Shared &) = delete;
    Shared &operator=(const Shared &) = delete;
    ~Shared() {
        munmap(base, length);
        close(file);
    }

    const size_t length;
    int file;
    void *base;

  private:
    [[noreturn]] void fail() {
        const std::string why = std::strerror(errno);
        if (file >= 0) close(file);
        throw std::invalid_argument("there is no memory for the buffer: " + why);
    }
};

// The buffer, and the store whose pool it is.
class Store {
  public:
    explicit Store(const Options &options)
        : options(options), bytes(options.object_bytes),
          half(std::min(options.buffer / bytes, 1UL << 16) / 2),
          length((2 * half * bytes + PAGE - 1) / PAGE * PAGE) {
        if (!options.server.empty()) shared.emplace(length);
        memory = static_cast<uint8_t *>(shared ? shared->base : std::aligned_alloc(PAGE, length));
        if (!memory) throw std::invalid_argument("there is no memory for the buffer");
        open();
    }
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;
    ~Store() {
        if (ripieno_close(store) != RIPIENO_STATUS_OK) say(ripieno_last_error());
    }

    // Returns for each object if it is stored.
    std::unique_ptr<bool[]> are_stored(std::span<const Key> keys) const {
        const std::shared_lock guard(lock);
        if (!store) throw Failure{RIPIENO_STATUS_FAILED, LOST};
        auto stored = std::make_unique<bool[]>(keys.size());
        if (!keys.empty())
            check(ripieno_are_stored(store, keys.front().data(), keys.size(), stored.get()));
        return stored;
    }

    // Returns how many objects fit into a store of our own. A server's is for others as well.
    double room() const { return capacity; }

    // Connects again to a server that was lost. Only the thread that moves calls it, without
    // requests.
    void poll() {
        uint64_t events = 0;
        if (store) {
            const auto status = ripieno_poll_events(store, &events);
            if (status == RIPIENO_STATUS_OK) return;
            if (!shared || status != RIPIENO_STATUS_FAILED) throw Failure{status};
        }
        const std::unique_lock guard(lock);
        // It fails, and leaves the memory to us.
        ripieno_close(std::exchange(store, nullptr));
        open();
    }

    // Copies objects into memory. Returns ERR_NOT_FOUND if one is not stored.
    nixl::Status load(std::span<const Key> keys, std::span<void *const> to,
                      const std::atomic<bool> &canceled) const {
        ripieno_prefix *made = nullptr;
        check(ripieno_lookup(store, keys.front().data(), keys.size(), &made));
        const Prefix prefix(made);
        if (ripieno_prefix_blocks(made) < keys.size()) return nixl::ERR_NOT_FOUND;
        return in_halves(
            keys.size(), canceled,
            [&](size_t first, std::span<const uint32_t> blocks) {
                ripieno_request *request = nullptr;
                check(ripieno_retrieve_begin(store, made, first, blocks.data(), blocks.size(),
                                             &request));
                return StoreRequest(request);
            },
            [&](size_t first, std::span<const uint32_t> blocks, StoreRequest request) {
                check(ripieno_layer_wait(request.get(), 0));
                for (size_t at = 0; at < blocks.size(); at++)
                    std::memcpy(to[first + at], block(blocks[at]), bytes);
            });
    }

    // Stores objects from memory, in place of older ones with these keys.
    nixl::Status save(std::span<const Key> keys, std::span<void *const> from,
                      const std::atomic<bool> &canceled) const {
        return in_halves(
            keys.size(), canceled,
            [&](size_t first, std::span<const uint32_t> blocks) {
                for (size_t at = 0; at < blocks.size(); at++)
                    std::memcpy(block(blocks[at]), from[first + at], bytes);
                const uint8_t *some = keys[first].data();
                uint32_t found = 0;
                // The store would keep the older object.
                check(ripieno_remove(store, some, blocks.size(), &found));
                ripieno_request *request = nullptr;
                size_t accepted = 0;
                check(ripieno_store_begin(store, some, blocks.data(), blocks.size(), &request,
                                          &accepted));
                StoreRequest owned(request);
                if (accepted < blocks.size()) throw Failure{RIPIENO_STATUS_NO_SPACE, FULL};
                return owned;
            },
            [&](size_t first, std::span<const uint32_t> blocks, StoreRequest request) {
                check(ripieno_commit(request.release()));
                again(keys.subspan(first, blocks.size()), blocks);
            });
    }

  private:
    static constexpr const char *FULL =
        "the store has no room for a batch of objects: give it more capacity or less buffer";
    static constexpr const char *WRITTEN =
        "another agent is writing an object of the transfer: post it again";
    static constexpr const char *LOST = "the server is lost, and was not there again yet";

    void open() {
        ripieno_pool pool{};
        pool.size = sizeof pool;
        pool.base = memory;
        pool.bytes = length;
        pool.blocks = 2 * half;
        ripieno_namespace space{};
        space.size = sizeof space;
        space.layout = space.label = "nixl";
        ripieno_config config{};
        config.size = sizeof config;
        config.shape = {.layers = 1, .segments = 1, .object_bytes = static_cast<uint32_t>(bytes),
                        .block_tokens = 1};
        config.pool = &pool;
        config.namespace_ = &space;
        if (shared) {
            config.server = options.server.c_str();
            pool.file = shared->file;
        } else {
            config.path = options.path.c_str();
            config.options = options.store.c_str();
            // A device may access it until then.
            pool.release = std::free;
            pool.release_context = memory;
        }
        check(ripieno_open(&config, &store));
        if (!shared) check(ripieno_get_stat(store, "capacity_blocks", &capacity));
    }

    uint8_t *block(uint32_t index) const { return memory + index * bytes; }

    // Stores those of committed objects that lookups do not find, from their blocks: another agent
    // was writing them, and the store leaves an object to who writes it first. Throws Failure if
    // one is not found afterwards either.
    void again(std::span<const Key> keys, std::span<const uint32_t> blocks) const {
        const auto stored = are_stored(keys);
        for (size_t at = 0; at < keys.size(); at++) {
            if (stored[at]) continue;
            size_t accepted = 0;
            check(ripieno_save(store, keys[at].data(), &blocks[at], 1, &accepted));
            if (accepted < 1) throw Failure{RIPIENO_STATUS_NO_SPACE, FULL};
            if (!are_stored(keys.subspan(at, 1))[0]) throw Failure{RIPIENO_STATUS_BUSY, WRITTEN};
        }
    }

    // Calls begin and end for each batch; begin is called for the next one before end is for this.
    nixl::Status in_halves(size_t count, const std::atomic<bool> &canceled, auto begin,
                           auto end) const {
        struct {
            std::vector<uint32_t> blocks;
            size_t first = 0;
            StoreRequest request;
        } halves[2];
        for (size_t first = 0, turn = 0; first < count || halves[turn ^ 1].request; turn ^= 1) {
            if (canceled) return nixl::ERR_CANCELED;
            auto &next = halves[turn], &last = halves[turn ^ 1];
            if (first < count) {
                next.blocks.resize(std::min(half, count - first));
                for (uint32_t at = 0; at < next.blocks.size(); at++)
                    next.blocks[at] = static_cast<uint32_t>(turn * half) + at;
                next.request = begin(first, std::span<const uint32_t>(next.blocks));
                check(ripieno_layer_start(next.request.get(), 0));
                next.first = std::exchange(first, first + next.blocks.size());
            }
            if (last.request)
                end(last.first, std::span<const uint32_t>(last.blocks), std::move(last.request));
        }
        return nixl::SUCCESS;
    }

    const Options &options;
    const size_t bytes;
    const size_t half;
    const size_t length;
    std::optional<Shared> shared;
    uint8_t *memory = nullptr;
    // Null while a server is lost, which only poll() changes.
    ripieno_store *store = nullptr;
    double capacity = HUGE_VAL;
    mutable std::shared_mutex lock;
};

// An object that was registered.
struct Object : nixl::BackendMD {
    explicit Object(const Key &key) : key(key) {}
    const Key key;
};

// A transfer of objects between memory and the store.
struct Transfer : nixl::BackendReqH {
    nixl::Operation operation;
    std::vector<Key> keys;
    std::vector<void *> memory;
    nixl::Status status = nixl::ERR_NOT_POSTED;
    std::atomic<bool> canceled = false;
};

class Engine : public nixl::BackendEngine {
  public:
    explicit Engine(const nixl::InitParams &init)
        : BackendEngine(init), options(*init.customParams), store(options),
          mover([this] { move(); }) {}

    ~Engine() override {
        {
            const std::lock_guard guard(lock);
            ending = true;
        }
        changed.notify_all();
        mover.join();
    }

    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return false; }
    nixl::Memories getSupportedMems() const override { return {nixl::OBJ_SEG, nixl::DRAM_SEG}; }
    nixl::Status connect(const std::string &) override { return nixl::SUCCESS; }
    nixl::Status disconnect(const std::string &) override { return nixl::SUCCESS; }

    nixl::Status registerMem(const nixl::BlobDesc &desc, const nixl::Memory &kind,
                             nixl::BackendMD *&out) override {
        if (kind != nixl::OBJ_SEG && kind != nixl::DRAM_SEG) return nixl::ERR_NOT_SUPPORTED;
        out = kind == nixl::OBJ_SEG ? new Object(key_of(desc)) : nullptr;
        return nixl::SUCCESS;
    }
    nixl::Status deregisterMem(nixl::BackendMD *object) override {
        delete object;
        return nixl::SUCCESS;
    }
    nixl::Status loadLocalMD(nixl::BackendMD *in, nixl::BackendMD *&out) override {
        out = in;
        return nixl::SUCCESS;
    }
    nixl::Status unloadMD(nixl::BackendMD *) override { return nixl::SUCCESS; }

    nixl::Status prepXfer(const nixl::Operation &operation, const Descs &local,
                          const Descs &remote, const std::string &, nixl::BackendReqH *&handle,
                          const nixl::Opaque *) const override {
        if (local.type != nixl::DRAM_SEG || remote.type != nixl::OBJ_SEG)
            return refuse("transfers are between DRAM and OBJ", nixl::ERR_NOT_SUPPORTED);
        if (local.descs.empty() || local.descs.size() != remote.descs.size())
            return refuse("both lists of a transfer must have as many parts, and at least one",
                          nixl::ERR_INVALID_PARAM);
        auto made = std::make_unique<Transfer>();
        made->operation = operation;
        for (size_t at = 0; at < local.descs.size(); at++) {
            const auto &from = local.descs[at];
            const auto &to = remote.descs[at];
            if (from.len != options.object_bytes || to.len != from.len || to.addr != 0) {
                return refuse("a transfer of " + std::to_string(from.len) + " bytes at " +
                              std::to_string(to.addr) + " was asked for; objects have " +
                              std::to_string(options.object_bytes) + " bytes (object_bytes), and "
                              "are moved whole", nixl::ERR_MISMATCH);
            }
            made->memory.push_back(reinterpret_cast<void *>(from.addr));
            made->keys.push_back(static_cast<const Object *>(to.metadataP)->key);
        }
        const std::set<Key> different(made->keys.begin(), made->keys.end());
        if (operation == nixl::WRITE && different.size() < made->keys.size())
            return refuse("a transfer writes an object twice", nixl::ERR_INVALID_PARAM);
        if (operation == nixl::WRITE && static_cast<double>(made->keys.size()) > store.room())
            return refuse("a transfer of " + std::to_string(made->keys.size()) +
                          " objects was asked for; the store has room for " +
                          std::to_string(static_cast<size_t>(store.room())) +
                          ": write fewer at a time, or give it more capacity",
                          nixl::ERR_INVALID_PARAM);
        handle = made.release();
        return nixl::SUCCESS;
    }

    nixl::Status postXfer(const nixl::Operation &, const Descs &, const Descs &,
                          const std::string &, nixl::BackendReqH *&handle,
                          const nixl::Opaque *) const override {
        auto *transfer = static_cast<Transfer *>(handle);
        const std::lock_guard guard(lock);
        if (transfer->status == nixl::IN_PROG) return nixl::ERR_REPOST_ACTIVE;
        transfer->status = nixl::IN_PROG;
        waiting.push_back(transfer);
        changed.notify_all();
        return nixl::IN_PROG;
    }

    nixl::Status checkXfer(nixl::BackendReqH *handle) const override {
        const std::lock_guard guard(lock);
        return static_cast<Transfer *>(handle)->status;
    }

    // Waits for the batches in flight: nothing accesses the caller's memory afterwards.
    nixl::Status releaseReqH(nixl::BackendReqH *handle) const override {
        auto *transfer = static_cast<Transfer *>(handle);
        {
            std::unique_lock guard(lock);
            std::erase(waiting, transfer);
            transfer->canceled = true;
            changed.wait(guard, [&] { return moving != transfer; });
        }
        delete transfer;
        return nixl::SUCCESS;
    }

    nixl::Status queryMem(const nixl::DescList<nixl::BlobDesc> &list,
                          std::vector<nixl::Found> &found) const override {
        found.assign(list.descs.size(), std::nullopt);
        if (list.type != nixl::OBJ_SEG) return nixl::ERR_NOT_SUPPORTED;
        try {
            std::vector<Key> keys;
            for (const auto &desc : list.descs) keys.push_back(key_of(desc));
            const auto stored = store.are_stored(keys);
            for (size_t at = 0; at < found.size(); at++)
                if (stored[at]) found[at].emplace();
        } catch (const Failure &failure) {
            return failed(failure);
        }
        return nixl::SUCCESS;
    }

  private:
    // Returns the key of an object: its name, or its number in decimal.
    static Key key_of(const nixl::BlobDesc &desc) {
        const auto name = desc.metaInfo.empty() ? std::to_string(desc.devId) : desc.metaInfo;
        Key key;
        check(ripieno_key_of_name(reinterpret_cast<const uint8_t *>(name.data()), name.size(),
                                  key.data()));
        return key;
    }

    static nixl::Status refuse(const std::string &why, nixl::Status status) {
        say(why);
        return status;
    }

    // Reports each kind of failure once.
    nixl::Status failed(const Failure &failure) const {
        const uint32_t kind = 1U << (failure.status & 31);
        if (!(told.fetch_or(kind) & kind)) say(failure.why + " (further ones are not reported)");
        return failure.nixl();
    }

    void move() {
        std::unique_lock guard(lock);
        while (!ending) {
            const auto wake = [this] { return ending || !waiting.empty(); };
            const bool idle = !changed.wait_for(guard, std::chrono::seconds(1), wake);
            moving = idle || ending ? nullptr : waiting.front();
            if (moving) waiting.pop_front();
            guard.unlock();
            const nixl::Status status = move(moving);
            guard.lock();
            if (moving) std::exchange(moving, nullptr)->status = status;
            changed.notify_all();
        }
    }

    nixl::Status move(const Transfer *transfer) {
        try {
            store.poll();
            if (!transfer) return nixl::SUCCESS;
            const auto act = transfer->operation == nixl::READ ? &Store::load : &Store::save;
            return (store.*act)(transfer->keys, transfer->memory, transfer->canceled);
        } catch (const Failure &failure) {
            return failed(failure);
        }
    }

    const Options options;
    Store store;
    mutable std::atomic<uint32_t> told = 0;
    mutable std::mutex lock;
    mutable std::condition_variable changed;
    mutable std::deque<Transfer *> waiting;
    Transfer *moving = nullptr;
    bool ending = false;
    // Last: it uses the others.
    std::thread mover;
};

nixl::BackendEngine *create(const nixl::InitParams *init) {
    try {
        return new Engine(*init);
    } catch (const Failure &failure) {
        say(failure.why);
    } catch (const std::exception &error) {
        say(error.what());
    }
    return nullptr;
}

nixl::Plugin plugin = {
    .apiVersion = 1,
    .createEngine = create,
    .destroyEngine = [](nixl::BackendEngine *engine) { delete engine; },
    .pluginName = [] { return "RIPIENO"; },
    .pluginVersion = [] { return RIPIENO_PLUGIN_VERSION; },
    .backendOptions =
        [] {
            return nixl::Params{{"path", ""}, {"capacity", ""}, {"server", ""},
                                {"object_bytes", ""}, {"buffer", "64MiB"}, {"devices", "1"}};
        },
    .backendMems = [] { return nixl::Memories{nixl::OBJ_SEG, nixl::DRAM_SEG}; },
};

} // namespace

extern "C" {
[[gnu::visibility("default")]] nixl::Plugin *nixl_plugin_init() { return &plugin; }
[[gnu::visibility("default")]] void nixl_plugin_fini() {}
}
