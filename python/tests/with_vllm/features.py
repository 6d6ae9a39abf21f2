"""Lives of engines for test_features.py: features.py SCENARIO MODEL STORE. Checks print why they
failed; the last line is JSON."""

import json
import os
import random
import sys
import threading
import time

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

BLOCK = 32
SAMPLING = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "detokenize": False}


def prompt(length, seed):
    chance = random.Random(seed)
    return [chance.randrange(10, 2000) for _ in range(length)]


class Engine:
    """An LLM in this process, and its connector's halves."""

    def __init__(self, model, store=None, *, transfer=(), blocks=96, extra=(), **options):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if store is not None:
            options = {"path": store, "capacity": "128MiB"} | options
            config = KVTransferConfig(
                kv_connector="RipienoConnector",
                kv_role="kv_both",
                kv_connector_extra_config=options,
                **dict(transfer),
            )
            extra = dict(extra) | {"kv_transfer_config": config}
        settings = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "block_size": BLOCK,
            "num_gpu_blocks_override": blocks,
            "enforce_eager": True,
            "max_num_batched_tokens": 256,
            "disable_log_stats": False,
        }
        settings |= dict(extra)
        self.llm = LLM(model=model, **settings)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = getattr(self.core.scheduler.connector, "_scheduler", None)
        if store is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.worker = get_kv_transfer_group()._worker

    def say(self, *prompts, **sampling):
        """Tokens of each, and how many were cached."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": each} for each in prompts]
        sampling = SamplingParams(**SAMPLING | sampling)
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return tokens, [output.num_cached_tokens for output in outputs]

    def settle(self):
        """Steps until nothing is on its way, as an engine with a process of its own does."""
        until = time.monotonic() + 20
        while self.core.scheduler.has_requests():
            assert time.monotonic() < until, "saves do not end"
            self.llm.llm_engine.step()

    def end(self):
        self.llm.llm_engine.engine_core.shutdown()


def metric(name, **labels):
    """The value of a sample, or None."""
    import prometheus_client

    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


class Held:
    """A plane whose stores wait until they are let go, or so long."""

    def __init__(self, plane, seconds=None):
        self._plane, self._seconds, self._stores = plane, seconds, set()
        self.may_go = threading.Event()

    def __getattr__(self, name):
        return getattr(self._plane, name)

    def begin_store(self, files, blocks):
        job = self._plane.begin_store(files, blocks)
        self._stores.add(job)
        return job

    def start(self, job, layer):
        if job in self._stores:
            self.may_go.wait(self._seconds)
        self._plane.start(job, layer)


class Lazy:
    """A plane whose loads do nothing until somebody waits for them."""

    def __init__(self, plane):
        self._plane, self._loads = plane, {}

    def __getattr__(self, name):
        return getattr(self._plane, name)

    def begin_load(self, *args):
        job = self._plane.begin_load(*args)
        self._loads[job] = []
        return job

    def start(self, job, layer):
        if job in self._loads:
            self._loads[job].append(layer)
        else:
            self._plane.start(job, layer)

    def end(self, jobs):
        for job in jobs:
            for layer in self._loads.pop(job, ()):
                self._plane.start(job, layer)
        return self._plane.end(jobs)


def hold(engine, seconds=None):
    """Its saves wait until the result is set, or so long."""
    engine.worker.plane = engine.worker.saver.plane = Held(engine.worker.plane, seconds)
    return engine.worker.plane.may_go


def main_life(model, store):
    """Metrics, events, resets, hit sources, evictions."""
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(model, store, extra={"kv_events_config": events})
    published = []
    publish = engine.core.scheduler.kv_event_publisher.publish
    engine.core.scheduler.kv_event_publisher.publish = lambda batch: (
        published.extend(batch.events),
        publish(batch),
    )
    a, b = prompt(420, 1), prompt(300, 2)
    a_said, cached = engine.say(a)
    assert cached == [0]
    engine.settle()
    stored = [
        event
        for event in published
        if type(event).__name__ == "BlockStored" and event.medium == "STORAGE"
    ]
    assert [event.block_size for event in stored] == [BLOCK] * 13, stored
    assert [event.token_ids for event in stored] == [
        (a + a_said[0])[at : at + BLOCK] for at in range(0, 13 * BLOCK, BLOCK)
    ]
    parents = [event.parent_block_hash for event in stored]
    assert parents == [None] + [event.block_hashes[0] for event in stored[:-1]]
    on_gpu = [
        event.block_hashes
        for event in published
        if type(event).__name__ == "BlockStored" and event.medium != "STORAGE"
    ]
    assert {event.block_hashes[0] for event in stored} <= {h for each in on_gpu for h in each}
    block_bytes = engine.worker.block_bytes
    for name, value in {
        "lookup_tokens": 420,
        "hit_tokens": 0,
        "stored_blocks": 13,
        "stored_bytes": 13 * block_bytes,
        "loaded_blocks": 0,
        "evicted_blocks": 0,
        "load_failures": 0,
    }.items():
        assert metric(f"ripieno_{name}_total", engine="0") == value, name
    assert metric("ripieno_save_seconds_count") >= 2
    assert metric("ripieno_used_blocks") == 13
    assert metric("ripieno_healthy") == 1
    assert metric("ripieno_pending_blocks") == 0

    # vLLM's own cache is reset, the store is not.
    assert engine.llm.reset_prefix_cache()
    said = engine.say(a[:200])
    assert said[1] == [192]
    assert engine.say(a[:200]) == said, "vLLM's own cache has as much"
    said, cached = engine.say(a)
    assert (said, cached) == (a_said, [416])
    # 192 of 416 tokens were in vLLM's own one.
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    assert metric(by_source, source="disk") == 192 + 224
    assert metric(by_source, source="device") == 192 + 192
    assert metric("ripieno_hit_tokens_total") == 192 + 224
    assert metric("ripieno_loaded_blocks_total") == 13
    assert metric("ripieno_loaded_bytes_total") == 13 * block_bytes
    assert metric("ripieno_load_seconds_count") == 2
    assert metric("ripieno_load_wait_seconds_count") == 2

    # The weights have changed: both are.
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    said, cached = engine.say(a)
    assert (said, cached) == (a_said, [0])
    engine.settle()
    assert any(type(event).__name__ == "AllBlocksCleared" for event in published)
    assert engine.llm.reset_prefix_cache()
    assert engine.say(a) == (a_said, [416]), "it is stored again"

    # What is evicted is told of.
    published.clear()
    engine.say(b)
    engine.settle()
    before = {
        event.block_hashes[0]
        for event in published
        if type(event).__name__ == "BlockStored" and event.medium == "STORAGE"
    }
    assert len(before) == 9
    evicted = engine.scheduler.catalog.evict(1000, engine.scheduler.namespace)
    assert evicted == 13 + 9
    engine.say(b)
    removed = [
        each
        for event in published
        if type(event).__name__ == "BlockRemoved" and event.medium == "STORAGE"
        for each in event.block_hashes
    ]
    assert len(removed) == len(set(removed)) == evicted
    assert before <= set(removed)
    assert metric("ripieno_evicted_blocks_total") == evicted

    # Nor is what is on its way when the weights change.
    may_go = hold(engine)
    engine.say(a, max_tokens=1)
    assert engine.scheduler.backlog == 13
    published.clear()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    may_go.set()
    engine.settle()
    assert [type(event).__name__ for event in published] == ["AllBlocksCleared"] * 2, "both caches"
    assert engine.llm.reset_prefix_cache()
    assert engine.say(a) == (a_said, [0])
    engine.llm.llm_engine.do_log_stats()
    engine.end()
    return {"a": a_said}


def full_graph(model, store):
    """Steps whose layers have no hooks."""
    import dataclasses

    from vllm.config import CUDAGraphMode
    from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

    import ripieno.vllm

    real, called = mixin.get_forward_context, []

    def context():
        found = real()
        return dataclasses.replace(found, cudagraph_runtime_mode=CUDAGraphMode.FULL)

    mixin.get_forward_context = context
    Connector = ripieno.vllm.RipienoConnector
    Connector.wait_for_layer_load = lambda self, name: called.append(name)
    Connector.save_kv_layer = lambda self, name, *rest: called.append(name)
    engine = Engine(model, store)
    a = prompt(420, 1)
    first = engine.say(a)
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    engine.worker.plane = Lazy(engine.worker.plane)
    for page in engine.worker.pages:
        page[1:] = 0
    second = engine.say(a)
    engine.end()
    assert called, "there were hooks to be suppressed"
    return {"tokens": [first[0], second[0]], "cached": [first[1], second[1]]}


def partial(model, store, load_async):
    """A block in the middle can not be read."""
    transfer = {"kv_load_failure_policy": "recompute"}
    engine = Engine(model, store, transfer=transfer, load_async=load_async == "async")
    a, tail = prompt(420, 1), prompt(64, 9)
    first, _ = engine.say(a)
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    # Three blocks stay in vLLM's own cache.
    engine.say(a[:100], max_tokens=1)
    engine.settle()
    loads = metric("ripieno_load_failures_total")
    keys = engine.scheduler._keys(FakeRequest(engine, a), 0, 13)
    held = engine.scheduler.catalog.acquire(engine.scheduler.namespace, keys)
    damage(store, engine, held.files[8])
    engine.scheduler.catalog.release(held.id)
    computed = count_computed(engine)
    second, cached = engine.say(a)
    engine.settle()
    result = {"same": second == first, "cached": cached, "computed": computed()}
    result["failures"] = metric("ripieno_load_failures_total") - loads
    result["mismatches"] = metric("ripieno_checksum_mismatches_total")
    # All of it is there again.
    assert engine.llm.reset_prefix_cache()
    result["again"] = engine.say(a + tail)[1]
    engine.end()
    return result


class FakeRequest:
    """What keys are made of."""

    def __init__(self, engine, tokens):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        hasher = engine.core.request_block_hasher
        request = Request("hashes", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        self.block_hashes = request.block_hashes


def damage(store, engine, file):
    """Other bytes where a file is: found by its content, which is that of a block."""
    import glob

    import torch

    plane, worker = engine.worker.plane, engine.worker
    scratch = worker.pages[0].shape[0] - 1
    job = plane.begin_load([file], [scratch])
    for layer in worker.layers.values():
        plane.start(job, layer)
    plane.end([job])
    content = worker.pages[2][scratch].numpy().tobytes()
    (path,) = glob.glob(f"{store}/*/rank-0/device-0.img")
    with open(path, "r+b") as image:
        data = image.read()
        assert (at := data.find(content)) >= 0
        image.seek(at + 1000)
        image.write(bytes([data[at + 1000] ^ 0x40]))
    for page in worker.pages:
        page[scratch] = torch.zeros_like(page[scratch])


def count_computed(engine):
    """How many tokens were computed from now on."""
    schedule, total = engine.core.scheduler.schedule, [0]

    def counted(*args, **more):
        output = schedule(*args, **more)
        total[0] += output.total_num_scheduled_tokens
        return output

    engine.core.scheduler.schedule = counted
    return lambda: total[0]


def shutdown(model, store, mode):
    """With saves on their way."""
    engine = Engine(model, store, shutdown=mode)
    engine.say(prompt(100, 5))
    engine.settle()
    may_go = hold(engine)
    engine.say(prompt(420, 1), max_tokens=1)
    assert engine.scheduler.backlog == 13
    threading.Timer(0.5, may_go.set).start()
    engine.end()
    return {}


def reuse(model, store, waits):
    """Blocks are used again at once, while their saves wait."""
    # Room for three requests, until they grow.
    engine = Engine(model, store, blocks=32, save_backlog=1.0, extra={"max_model_len": 512})
    if waits == "no":
        begin = engine.worker.saver.begin_step
        engine.worker.saver.begin_step = lambda saves, reused: begin(saves, [])
    may_go = hold(engine, seconds=0.1 if waits == "yes" else None)
    prompts = [prompt(310, seed) for seed in range(20, 26)]
    said, _ = engine.say(*prompts)
    may_go.set()
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    again, cached = engine.say(*prompts)
    preempted = metric("vllm:num_preemptions_total")
    result = {"same": said == again, "cached": cached, "preempted": preempted}
    result["dropped"] = metric("ripieno_dropped_blocks_total")
    engine.end()
    return result


def dead(model, store):
    """The drive is gone."""
    import ripieno

    engine = Engine(model, store, transfer={"kv_load_failure_policy": "recompute"})
    a, b = prompt(420, 1), prompt(300, 2)
    first, _ = engine.say(a, b)
    engine.settle()
    assert engine.llm.reset_prefix_cache()

    class Gone(Held):
        def end(self, jobs):
            raise ripieno.ClosedError("the drive is gone")

        def begin_load(self, *args):
            raise ripieno.ClosedError("the drive is gone")

        begin_store = begin_load

    engine.worker.plane = engine.worker.saver.plane = Gone(engine.worker.plane)
    second, _ = engine.say(a, b)
    assert engine.llm.reset_prefix_cache()
    third, cached = engine.say(a, b)
    assert metric("ripieno_healthy") == 0
    engine.end()
    return {"same": first == second == third, "cached": cached}


LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    # Multi-head latent attention: one row of 576 numbers a token.
    "mla": LLAMA
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
    # Sliding windows in five of six layers.
    "gemma3": LLAMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
}


def architecture(model, store, name, **settings):
    """Another kind of model. Its weights are random, and give tokens that know no context: blocks
    are compared byte by byte."""
    import torch

    path = f"{model}-{name}"
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/config.json", "w") as file:
        json.dump(ARCHITECTURES[name], file)
    size = 16 if name == "mla" else BLOCK
    settings = {"load_format": "dummy", "block_size": size} | settings
    engine = Engine(path, store, extra=settings, keep_on_reset=True)
    moves, right = [], []
    worker, begin, arrived = engine.worker, engine.worker.saver.begin_step, engine.worker._arrived

    def begin_step(saves, reused):
        for save in saves:
            moves.extend(zip(save.files, save.blocks, strict=True))
        begin(saves, reused)

    def compare(task, good):
        arrived(task, good)
        for file, block in zip(task.files, task.blocks, strict=True):
            pairs = zip(worker.pages, stored[file], strict=True)
            right.append(all(torch.equal(page[block], each) for page, each in pairs))

    worker.saver.begin_step = begin_step
    a = prompt(420, 1)
    said, _ = engine.say(a, max_tokens=1)
    engine.settle()
    stored = {}
    for file, block in moves:
        stored[file] = [page[block].clone() for page in worker.pages]
        assert stored[file][0].any(), "something was computed"
    assert len({bytes(pages[0].numpy()) for pages in stored.values()}) == len(stored)
    assert engine.llm.reset_prefix_cache(reset_connector=True), "of which the store keeps all"
    for page in worker.pages:
        page[1:] = 0
    worker._arrived = compare
    again, cached = engine.say(a, max_tokens=1)
    engine.end()
    return {"same": said == again, "cached": cached, "right": right}


def hybrid(model, store):
    """What needs the hybrid manager."""
    return architecture(model, store, "gemma3", disable_hybrid_kv_cache_manager=False)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    result = globals()[name](*arguments)
    print(json.dumps(result))
    sys.stdout.flush()
