"""The life of one engine with vLLM's tiered offloading: tiering_engine.py MODEL SETTINGS. Its last
line is JSON.

Settings: "tier": options of the tier, or none; "chunks": of the CPU tier; "tp"; "salt"; "kill":
after so many milliseconds of the second group of prompts; "break_tier": close its store after the
first prompt; "sabotage": what a load does wrong.
"""

import json
import os
import random
import signal
import sys
import threading

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
# More threads wait for each other, on a machine that is in use.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

BLOCK, GPU_BLOCKS = 32, 96


def prompts():
    """Three that begin alike, and another one."""
    chance = random.Random(7)

    def tokens(count):
        return [chance.randrange(10, 2000) for _ in range(count)]

    shared = tokens(320)
    return [shared + tokens(100) for _ in range(3)] + [tokens(517)]


def sabotage():
    """The tier's loads leave what is in the region."""
    from ripieno.tiering import RipienoTier

    RipienoTier._load_all = lambda self, keys, chunks: True


def break_tier(llm):
    """As a drive that is gone for good."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.connector.connector_scheduler.manager
    manager.secondary_tiers[0].store.close()
    # And what is asked for next is nowhere else.
    assert llm.reset_prefix_cache()
    manager.primary_tier.reset_cache()


def transfer(settings):
    from vllm.config import KVTransferConfig

    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "host_tiering",
        "cpu_bytes_to_use": settings["cpu"],
        "blocks_per_chunk": settings.get("blocks_per_chunk", 1),
        "secondary_tiers": [
            {"type": "RipienoTier", "module_path": "ripieno.tiering", **settings["tier"]}
        ],
    }
    # vLLM names its region of shared memory by it.
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=settings["name"],
        kv_connector_extra_config=extra,
    )


def main(model, settings):
    from vllm import LLM, SamplingParams

    if settings.get("sabotage"):
        sabotage()
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        block_size=BLOCK,
        num_gpu_blocks_override=GPU_BLOCKS,
        enforce_eager=True,
        tensor_parallel_size=settings.get("tp", 1),
        max_num_batched_tokens=256,
        prefix_caching_hash_algo="sha256",
        disable_hybrid_kv_cache_manager=False,
        disable_log_stats=False,
        kv_transfer_config=transfer(settings) if settings.get("tier") else None,
    )
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    first, *others = prompts()
    for group in ([first], others):
        requests = [{"prompt_token_ids": prompt} for prompt in group]
        for request in requests:
            request |= {"cache_salt": settings["salt"]} if settings.get("salt") else {}
        if settings.get("kill") and group is others:
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(settings["kill"] / 1000, os.kill, kill).start()
        for output in llm.generate(requests, sampling, use_tqdm=False):
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens)
        if settings.get("break_tier") and group is not others:
            break_tier(llm)
    prefix = "vllm:ripieno_tier_"
    ours = [metric for metric in llm.get_metrics() if metric.name.startswith(prefix)]
    metrics = {metric.name.removeprefix(prefix): metric.value for metric in ours}
    print(json.dumps({"tokens": tokens, "cached": cached, "metrics": metrics}))
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
