"""Features of the connector besides finding blocks."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
import gemma as gemmas  # noqa: E402
from forked import life_of, live, metric  # noqa: E402
from prompts import BLOCK, PROMPTS, tokens, whole  # noqa: E402
from vllm.config import CUDAGraphMode, KVEventsConfig  # noqa: E402
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.metrics.reader import get_metrics_snapshot  # noqa: E402
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin  # noqa: E402

A, B = PROMPTS[0], tokens(290)
A_BLOCKS, B_BLOCKS = whole(A) // BLOCK, whole(B) // BLOCK


def lines(life, text):
    assert life.error is None, f"{life.error}\n{life.said[-6000:]}"
    return [line for line in life.said.splitlines() if text in line]


def test_the_plugin_is_installed_and_imports_little():
    code = (
        "import sys; from importlib.metadata import entry_points as found;"
        "(plugin,) = found(group='vllm.general_plugins', name='ripieno'); plugin.load();"
        "print([name for name in ('ripieno', 'torch', 'vllm') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "['ripieno']", ended.stderr


class Told:
    """Collects the events that vLLM publishes."""

    def __init__(self, engine):
        self.events, publisher = [], engine.scheduler.kv_event_publisher
        publish = publisher.publish
        publisher.publish = lambda batch: (self.events.extend(batch.events), publish(batch))

    def of(self, name, is_ours=True):
        named = [event for event in self.events if type(event).__name__ == name]
        return [event for event in named if (event.medium == "STORAGE") == is_ours]


def counts_and_events(engine):
    told = Told(engine)
    said, cached = engine.ask(A)
    assert cached == [0]
    engine.settle()
    stored = told.of("BlockStored")
    assert {event.block_size for event in stored} == {BLOCK}
    assert [token for event in stored for token in event.token_ids] == A[: whole(A)]
    keys = [key for event in stored for key in event.block_hashes]
    assert len(keys) == A_BLOCKS
    runs = [event.block_hashes[-1] for event in stored]
    assert [event.parent_block_hash for event in stored] == [None, *runs[:-1]]
    on_gpu = told.of("BlockStored", is_ours=False)
    assert set(keys) <= {key for event in on_gpu for key in event.block_hashes}
    block_bytes = engine.worker.block_bytes
    for name, value in {
        "lookup_tokens": len(A),
        "hit_tokens": 0,
        "stored_blocks": A_BLOCKS,
        "stored_bytes": A_BLOCKS * block_bytes,
        "loaded_blocks": 0,
        "evicted_blocks": 0,
        "load_failures": 0,
    }.items():
        assert metric(f"vllm:ripieno_{name}_total", engine="0") == value, name
    assert metric("vllm:ripieno_save_seconds_count") >= 2
    assert metric("vllm:ripieno_used_blocks") == A_BLOCKS
    assert metric("vllm:ripieno_healthy") == 1
    assert metric("vllm:ripieno_pending_blocks") == 0
    # LLM.get_metrics() returns these.
    found = {each.name: each for each in get_metrics_snapshot()}
    assert found["vllm:ripieno_stored_blocks"].value == A_BLOCKS
    assert found["vllm:ripieno_save_seconds"].count >= 2

    # vLLM's own cache is reset, the store is not.
    assert engine.llm.reset_prefix_cache()
    again = engine.ask(A[:200])
    assert again[1] == [192]
    assert engine.ask(A[:200]) == again, "vLLM's own cache has as much"
    assert engine.ask(A) == (said, [416])
    # 192 of 416 tokens were in vLLM's own cache.
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    assert metric(by_source, source="disk") == 192 + 224
    assert metric(by_source, source="device") == 192 + 192
    assert metric("vllm:ripieno_hit_tokens_total") == 192 + 224
    assert metric("vllm:ripieno_loaded_blocks_total") == A_BLOCKS
    assert metric("vllm:ripieno_loaded_bytes_total") == A_BLOCKS * block_bytes
    assert metric("vllm:ripieno_load_seconds_count") == 2
    assert metric("vllm:ripieno_load_wait_seconds_count") == 2
    engine.settle()
    resets(engine, told, said)
    evictions(engine, told)
    engine.llm.do_log_stats()


def resets(engine, told, said):
    # The weights have changed: both caches are reset.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.ask(A) == (said, [0])
    engine.settle()
    assert any(type(event).__name__ == "AllBlocksCleared" for event in told.events)
    assert engine.llm.reset_prefix_cache()
    assert engine.ask(A) == (said, [416]), "it is stored again"
    engine.settle()

    # Blocks whose stores were in flight are not found either.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.plane.may_go.clear()
    engine.ask(A, max_tokens=1)
    assert engine.connector.backlog == A_BLOCKS
    told.events.clear()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.plane.may_go.set()
    engine.settle()
    cleared = [type(event).__name__ for event in told.events]
    assert cleared == ["AllBlocksCleared"] * 2, "both caches"
    assert engine.llm.reset_prefix_cache()
    assert engine.ask(A) == (said, [0])
    engine.settle()


def evictions(engine, told):
    told.events.clear()
    engine.ask(B)
    engine.settle()
    stored = {key for event in told.of("BlockStored") for key in event.block_hashes}
    assert len(stored) == B_BLOCKS
    evicted = engine.connector.catalog.evict(1000, engine.connector.namespace)
    assert evicted == A_BLOCKS + B_BLOCKS
    engine.ask(B)
    removed = [key for event in told.of("BlockRemoved") for key in event.block_hashes]
    assert len(removed) == len(set(removed)) == evicted
    assert stored <= set(removed)
    assert metric("vllm:ripieno_evicted_blocks_total") == evicted


def test_metrics_events_and_resets(model, options):
    life = life_of(
        counts_and_events,
        model=model,
        options=options,
        plane=faults.Held,
        # By its short name.
        module=None,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    (line,) = lines(life, "KV Transfer metrics:")
    for part in (f"hit_tokens={2 * whole(A)}", "stored_blocks=", "mean_load_seconds="):
        assert part in line


def test_steps_without_hooks_wait_for_their_loads(model, options):
    def ask(engine):
        real, called = mixin.get_forward_context, []
        full = {"cudagraph_runtime_mode": CUDAGraphMode.FULL}
        mixin.get_forward_context = lambda: dataclasses.replace(real(), **full)
        connector = type(engine.scheduler.connector)
        connector.wait_for_layer_load = lambda self, name: called.append(name)
        connector.save_kv_layer = lambda self, name, *rest: called.append(name)
        first = engine.ask(A)
        engine.forget()
        for cache in engine.caches:
            cache[1:] = 0
        second = engine.ask(A)
        assert called, "there were hooks to be suppressed"
        return first, second

    first, second = live(ask, model=model, options=options, plane=faults.Lazy)
    assert (first[1], second) == ([0], (first[0], [whole(A)]))


def damage(store, content):
    """Flips a bit of a page, located on the medium by its contents."""
    (medium,) = pathlib.Path(store).glob("*/rank-0/device-0.img")
    with medium.open("r+b") as image:
        at = image.read().index(content) + 1000
        image.seek(at)
        image.write(bytes([content[1000] ^ 0x40]))


def computed_by(engine):
    """Counts the tokens computed from now on."""
    schedule, total = engine.scheduler.schedule, [0]

    def counted(*args, **more):
        output = schedule(*args, **more)
        total[0] += output.total_num_scheduled_tokens
        return output

    engine.scheduler.schedule = counted
    return lambda: total[0]


def test_blocks_before_one_that_failed_are_used(model, both, said):
    def ask(engine):
        engine.ask(A)
        engine.settle()
        page = list(engine.blocks().values())[8][2]
        engine.forget()
        # Three blocks stay in vLLM's own cache.
        engine.ask(A[:100], max_tokens=1)
        engine.settle()
        damage(both["path"], page)
        failures, computed = metric("vllm:ripieno_load_failures_total"), computed_by(engine)
        answer, _ = engine.ask(A)
        computed = computed()
        engine.settle()
        failures = metric("vllm:ripieno_load_failures_total") - failures
        mismatches = metric("vllm:ripieno_checksum_mismatches_total")
        # All blocks are stored again.
        engine.forget()
        return answer, computed, failures, mismatches, engine.ask(A + tokens(64))[1]

    settings = {"model": model, "options": both, "policy": "recompute"}
    answer, computed, *rest = live(ask, **settings)
    assert (answer, rest) == ([said[0]], [1, 1, [whole(A)]])
    # Computed: the blocks from the damaged one on, and the generated tokens.
    assert computed < len(A) - 8 * BLOCK + len(A) - whole(A) + 40, "the first eight were kept"


@pytest.mark.parametrize(("mode", "dropped"), [("drain", 0), ("drop", A_BLOCKS)])
def test_the_end_with_saves_on_their_way(model, options, mode, dropped):
    def leave(engine):
        engine.ask(tokens(100))
        # An idle engine does not wait for saves that it would drop.
        while engine.connector.saves:
            engine.ask([1], max_tokens=1)
        engine.plane.may_go.clear()
        engine.ask(A, max_tokens=1)
        assert engine.connector.backlog == A_BLOCKS
        threading.Timer(0.5, engine.plane.may_go.set).start()

    life = life_of(leave, model=model, options=options | {"shutdown": mode}, plane=faults.Held)
    (line,) = lines(life, "ripieno: shutdown")
    text = f"({mode}): {A_BLOCKS} blocks were on their way, {dropped} of them were dropped"
    assert text in line
    assert f"stored={3 + A_BLOCKS - dropped}," in line


@pytest.mark.parametrize("waits", [True, False])
def test_blocks_are_used_again_when_their_saves_have_ended(model, options, waits):
    """Blocks are reused while their saves wait. Without the wait, wrong bytes are noticed."""
    some = [tokens(310) for _ in range(6)]

    def ask(engine):
        engine.plane.seconds = 0.1 if waits else 60
        engine.plane.may_go.clear()
        if not waits:
            begin = engine.worker.saver.begin_step
            engine.worker.saver.begin_step = lambda saves, reused: begin(saves, [])
        said, _ = engine.ask(*some)
        engine.plane.may_go.set()
        engine.forget()
        again, cached = engine.ask(*some)
        return said == again, sum(cached), metric("vllm:num_preemptions_total")

    # Room for three requests, until they grow.
    few = {"num_gpu_blocks_override": 32, "max_model_len": 512}
    options["save_backlog"] = 1.0
    same, cached, preempted = live(ask, model=model, options=options, plane=faults.Held, **few)
    assert preempted > 0
    assert cached > (1000 if waits else 0)
    assert same == waits


MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    # One row of 576 elements per token.
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


def test_a_request_may_store_nothing(model, options):
    def ask(engine):
        nothing = {"extra_args": {"kv_transfer_params": {"ripieno.store": False}}}
        cached = []
        for prompt, more in [(A, {}), (A, nothing), (B, nothing), (B, {}), (B, {})]:
            cached += engine.ask(prompt, **more)[1]
            engine.forget()
        return cached

    assert live(ask, model=model, options=options) == [0, 416, 0, 0, 288]


def hint(kind, payload, version="1"):
    return KvHintsEnvelope("1", "m", [KvHintAction("a", kind, version, payload)])


def test_hints_pin_the_blocks_of_a_request(model, options):
    def hinted(engine, prompt, *hint_of, **more):
        """Returns the answer to a hint of a request for a prompt."""
        engine.ask(prompt, hints=hint(*hint_of), max_tokens=1, **more)
        (answer,) = list(engine.answers.values())[-1].output.kv_transfer_params["ripieno.hints"]
        assert answer.pop("action_id") == "a"
        engine.forget()
        return answer

    def found(engine):
        """Evicts all blocks that are not held. Returns what is found of A and of B."""
        engine.ask(tokens(20), max_tokens=1)
        engine.forget()
        engine.connector.catalog.evict(1 << 20)
        cached = [engine.ask(prompt, max_tokens=1)[1][0] for prompt in (A, B)]
        engine.forget()
        return cached

    def outcomes(engine):
        answers, hits = [], []
        answers.append(hinted(engine, A, "kv.pin", {"ttl_s": 3600}))
        assert engine.ask(B)[1] == [0]
        hits.append(found(engine))
        shape = engine.connector.cache.shape
        few = 5 * shape.rows * shape.object_bytes
        answers.append(hinted(engine, B, "kv.pin", {"ttl_s": 10**6, "bytes_max": few}))
        hits.append(found(engine))
        answers.append(hinted(engine, tokens(20), "kv.deref", {"pin": 1}))
        answers.append(hinted(engine, tokens(20), "kv.deref", {"pin": 1}))
        answers.append(hinted(engine, tokens(20), "kv.deref", {"pin": 2}))
        hits.append(found(engine))
        answers.append(hinted(engine, A, "kv.pin", {"ttl_s": 1}))
        # It ends without a step.
        time.sleep(1)
        assert engine.connector.catalog.evict(1 << 20) >= A_BLOCKS
        hits.append(found(engine))
        refused = [
            hinted(engine, A, "kv.pin", {}),
            hinted(engine, A, "kv.pin", {"ttl_s": 5, "tll": 5}),
            hinted(engine, A, "kv.pin", {"ttl_s": 1 << 64}),
            hinted(engine, A, "kv.pin", {"ttl_s": 5, "bytes_max": 1}),
            hinted(engine, A, "kv.pin", {"ttl_s": 5}, "2.0"),
            hinted(engine, A, "kv.retain", {}),
            hinted(engine, A, "kv.unheard", {}),
        ]
        answers.append(hinted(engine, A[:5], "kv.pin", {"ttl_s": 5}))
        hinted(engine, A, "kv.pin", {"ttl_s": 3600})
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        return answers, hits, refused, hinted(engine, tokens(20), "kv.deref", {"pin": 4})

    answers, hits, refused, left = live(outcomes, model=model, options=options)
    kinds = ["deferred", "clipped", "accepted", "missing", "accepted", "accepted", "missing"]
    assert [answer["outcome"] for answer in answers] == kinds
    assert [answer["pin"] for answer in answers] == [1, 2, None, None, None, 3, None]
    assert "when they are stored" in answers[0]["reason"]
    assert "room for" in answers[1]["reason"] and "86400 s" in answers[1]["reason"]
    hit = A_BLOCKS * BLOCK
    assert hits == [[hit, 0], [hit, 5 * BLOCK], [0, 0], [0, 0]]
    assert {answer["outcome"] for answer in refused} == {"rejected"}
    reasons = ["ttl_s: None", "tll is unknown", "64 bits", "room for 0", "version 2.0", "reuse"]
    reasons.append("is unknown")
    for answer, reason in zip(refused, reasons, strict=True):
        assert reason in answer["reason"]
    assert left["outcome"] == "missing", "a reset ends pins"


@pytest.mark.parametrize("kind", ["latent", "windows"])
def test_other_kinds_of_attention(tmp_path, options, kind):
    """Compares all bytes of all layers. vLLM has no prefix cache for latents on the CPU, and the
    tokens of its dummy weights do not depend on the context."""

    def contents(engine):
        """Returns tokens, the number of cached ones, and the bytes of each block of the prompt."""
        for cache in engine.caches:
            cache[:] = 0
        answer = engine.add(A, max_tokens=2)
        while not engine.answers[answer].tokens:
            engine.step()
        (request,) = engine.scheduler.requests
        (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(request)
        blocks = blocks[: 416 // size]
        pages = [b"".join(cache[at].numpy().tobytes() for cache in engine.caches) for at in blocks]
        engine.run()
        engine.settle()
        return engine.answers[answer].tokens, engine.answers[answer].cached, pages

    def ask(engine):
        first = contents(engine)
        # The store keeps all of these blocks.
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        return first, contents(engine)

    path = tmp_path / "model"
    if kind == "latent":
        path.mkdir()
        (path / "config.json").write_text(json.dumps(MLA))
        # vLLM's choice on a CPU with AMX does not compute in float32.
        size, settings = 16, {"load_format": "dummy", "attention_backend": "CPU_MLA"}
    else:
        gemmas.make(path)
        size, settings = BLOCK, {"disable_hybrid_kv_cache_manager": True}
    settings |= {"options": options | {"keep_on_reset": True}, "block_size": size}
    (said, none, computed), second = live(ask, model=path, **settings)
    assert none == 0
    assert len(set(computed)) == 416 // size
    assert second == (said, 416, computed)


def test_a_unit_that_no_request_fills_is_told_at_the_start(model, options):
    life = life_of(lambda engine: None, model=model, options=options, max_model_len=BLOCK - 8)
    assert life.error is None, life.error
    assert f"a prompt is stored and found in units of {BLOCK} tokens" in life.said
    told = (
        f"nothing will be stored: a unit has {BLOCK} tokens, and a request has at most {BLOCK - 8}"
    )
    assert told in life.said
