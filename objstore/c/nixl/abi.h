// The binary interface between NIXL's library and a backend: the layout of classes, the order of
// their virtual functions, and two functions that NIXL looks up. NIXL's packages have no headers,
// so this declares plugin API 1 as it is in NIXL 1.4 and 1.5, and nothing else of NIXL. A test
// compares the order with the tables of NIXL's own backends. Names are not part of the interface;
// these are NIXL's, without the prefix.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nixl {

enum Memory : uint32_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum Operation : uint32_t { READ, WRITE };

enum Status : int32_t {
    IN_PROG = 1,
    SUCCESS = 0,
    ERR_NOT_POSTED = -1,
    ERR_INVALID_PARAM = -2,
    ERR_BACKEND = -3,
    ERR_NOT_FOUND = -4,
    ERR_MISMATCH = -5,
    ERR_REPOST_ACTIVE = -7,
    ERR_NOT_SUPPORTED = -9,
    ERR_CANCELED = -11,
};

using Params = std::unordered_map<std::string, std::string>;
using Memories = std::vector<Memory>;
// An entry of what a query found: nothing, or its properties.
using Found = std::optional<Params>;

struct Opaque;

// Part of memory, or of an object: addr is then an offset, and devId the object's number.
struct Desc {
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};

struct BlobDesc : Desc {
    std::string metaInfo;
};

// Of a registration.
class BackendMD {
  public:
    virtual ~BackendMD() = default;

  protected:
    bool isPrivateMD = true;
};

struct MetaDesc : Desc {
    BackendMD *metadataP;
};

// Made by NIXL only.
template <class T> struct DescList {
    const void *virtuals;
    Memory type;
    std::vector<T> descs;
};

// A transfer.
class BackendReqH {
  public:
    virtual ~BackendReqH() = default;
};

struct InitParams {
    std::string localAgent;
    std::string type;
    Params *customParams;
    bool enableProgTh;
    uint64_t pthrDelay;
    uint32_t syncMode;
    bool enableTelemetry;
};

class BackendEngine {
    // NIXL reads and empties these.
    std::string backendType;
    Params customParams;
    std::vector<Opaque *> telemetryEvents;
    std::mutex telemetryEventsMutex;

  protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry;

    using Descs = DescList<MetaDesc>;

  public:
    explicit BackendEngine(const InitParams &init)
        : backendType(init.type), customParams(*init.customParams), localAgent(init.localAgent),
          enableTelemetry(init.enableTelemetry) {}
    BackendEngine(const BackendEngine &) = delete;
    BackendEngine &operator=(const BackendEngine &) = delete;

    // In the order of NIXL's table. Those with a body are for what we do not support.
    virtual ~BackendEngine() = default;
    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual Memories getSupportedMems() const = 0;
    virtual Status registerMem(const BlobDesc &, const Memory &, BackendMD *&) = 0;
    virtual Status deregisterMem(BackendMD *) = 0;
    virtual Status connect(const std::string &) = 0;
    virtual Status disconnect(const std::string &) = 0;
    virtual Status unloadMD(BackendMD *) = 0;
    virtual Status prepXfer(const Operation &, const Descs &local, const Descs &remote,
                            const std::string &agent, BackendReqH *&, const Opaque *) const = 0;
    virtual Status postXfer(const Operation &, const Descs &local, const Descs &remote,
                            const std::string &agent, BackendReqH *&, const Opaque *) const = 0;
    virtual Status checkXfer(BackendReqH *) const = 0;
    virtual Status releaseReqH(BackendReqH *) const = 0;
    virtual Status prepMemView(const Opaque &, void *&, const Opaque *) const {
        return ERR_NOT_SUPPORTED;
    }
    virtual Status prepMemView(const Descs &, void *&, const Opaque *) const {
        return ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(void *) const {}
    virtual Status getPublicData(const BackendMD *, std::string &) const {
        return ERR_NOT_SUPPORTED;
    }
    virtual Status getConnInfo(std::string &) const { return ERR_NOT_SUPPORTED; }
    virtual Status loadRemoteConnInfo(const std::string &, const std::string &) {
        return ERR_NOT_SUPPORTED;
    }
    virtual Status loadRemoteMD(const BlobDesc &, const Memory &, const std::string &,
                                BackendMD *&) {
        return ERR_NOT_SUPPORTED;
    }
    virtual Status loadLocalMD(BackendMD *, BackendMD *&) = 0;
    virtual Status getNotifs(std::vector<std::pair<std::string, std::string>> &) {
        return ERR_NOT_SUPPORTED;
    }
    virtual Status genNotif(const std::string &, const std::string &) const {
        return ERR_NOT_SUPPORTED;
    }
    virtual Status queryMem(const DescList<BlobDesc> &, std::vector<Found> &) const = 0;
    virtual Status estimateXferCost(const Operation &, const Descs &, const Descs &,
                                    const std::string &, BackendReqH *const &,
                                    std::chrono::microseconds &, std::chrono::microseconds &,
                                    int32_t &, const Opaque *) const {
        return ERR_NOT_SUPPORTED;
    }
};

struct Plugin {
    int apiVersion;
    BackendEngine *(*createEngine)(const InitParams *);
    void (*destroyEngine)(BackendEngine *);
    const char *(*pluginName)();
    const char *(*pluginVersion)();
    Params (*backendOptions)();
    Memories (*backendMems)();
};

static_assert(sizeof(Desc) == 24 && sizeof(BlobDesc) == 56 && sizeof(MetaDesc) == 32);
static_assert(sizeof(DescList<MetaDesc>) == 40 && sizeof(BackendMD) == 16);
static_assert(sizeof(InitParams) == 96 && sizeof(Plugin) == 56);

} // namespace nixl
