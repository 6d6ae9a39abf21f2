"""The life of one engine: engine.py MODEL SETTINGS. Its last line is JSON.

Settings: "options" of the connector, or none; "tp"; "policy"; "hash"; "kill": after the first
prompt; "sabotage": what the worker does wrong.
"""

import json
import os
import random
import signal
import sys
import time

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
# More threads wait for each other, on a machine that is in use.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

BLOCK = 32


def prompts():
    """Three that begin alike, and another one."""
    chance = random.Random(7)

    def tokens(count):
        return [chance.randrange(10, 2000) for _ in range(count)]

    shared = tokens(320)
    return [shared + tokens(100) for _ in range(3)] + [tokens(517)]


def sabotage(how):
    """Bugs, to see the tests fail."""
    import ripieno.vllm

    Worker = ripieno.vllm.Worker
    arrived = Worker._arrived

    def swapped(self, task, good):
        arrived(self, task, good)
        for page in self.pages:
            half = page.shape[1] // 2
            blocks = page[task.blocks]
            page[task.blocks] = blocks.roll(half, 1)

    def nothing(self, task, good):
        arrived(self, task, good)
        for page in self.pages:
            page[task.blocks] = 0

    # The layers' hooks wait for nothing then: what is done wrong is done before them.
    def start(self, has_hooks, start=Worker.start_loads):
        start(self, has_hooks=False)

    Worker.start_loads = start
    Worker._arrived = {"swapped": swapped, "nothing": nothing}[how]


def main(model, settings):
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if options := settings.get("options"):
        if how := settings.get("sabotage"):
            sabotage(how)
        transfer = KVTransferConfig(
            kv_connector="RipienoConnector",
            kv_role="kv_both",
            kv_connector_module_path="ripieno.vllm",
            kv_connector_extra_config=options,
            kv_load_failure_policy=settings.get("policy", "fail"),
        )
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        block_size=BLOCK,
        num_gpu_blocks_override=96,
        enforce_eager=True,
        tensor_parallel_size=settings.get("tp", 1),
        # Longer prompts are computed in chunks.
        max_num_batched_tokens=256,
        prefix_caching_hash_algo=settings.get("hash", "sha256"),
        kv_transfer_config=transfer,
    )
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    first, *others = prompts()
    for group in ([first], others):
        requests = [{"prompt_token_ids": prompt} for prompt in group]
        for output in llm.generate(requests, sampling, use_tqdm=False):
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens)
        if settings.get("kill"):
            # What was committed is made permanent by a thread of its own.
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps({"tokens": tokens, "cached": cached}))
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
