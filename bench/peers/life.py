"""One engine process: life.py MODEL SIDE FOLDER BYTES. One JSON question per line in, one answer
out. BYTES is the capacity of a store.

Questions: {"prompt": [tokens], "reset": true to clear vLLM's own prefix cache first}.
Answers: {"ttft": seconds, "cpu": seconds of all threads, "cached": tokens, "tokens": [...]}.
"""

import json
import os
import pathlib
import sys
import time

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
# On a busy machine, several threads would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

BLOCK, BLOCKS, GENERATED = 32, 224, 8


def cpu(processes):
    """Returns the CPU seconds of all live threads of these processes."""
    total = 0
    for process in processes:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0])
    return total / 1e9


def start(model, transfer, prefix_caching):
    from vllm import LLM

    return LLM(
        model=model,
        dtype=json.loads(pathlib.Path(model, "config.json").read_text())["torch_dtype"],
        skip_tokenizer_init=True,
        max_model_len=4096,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        enforce_eager=True,
        # One step per prompt: ExampleConnector cannot store chunked prompts.
        max_num_batched_tokens=4096,
        enable_prefix_caching=prefix_caching,
        prefix_caching_hash_algo="sha256",
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )


def rest_as_a_process_does(llm):
    """Sleeps after steps without computation, to yield the processor to threads that load. vLLM's
    engine core does that in its own process, but not in its caller's."""
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def step_and_rest():
        outputs, computed = step()
        if not computed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, computed

    core.step_fn = step_and_rest


def ask(llm, name, question, processes):
    from vllm import SamplingParams

    if question.get("reset"):
        assert llm.reset_prefix_cache()
    engine = llm.llm_engine
    sampling = SamplingParams(
        max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False
    )
    before, began = cpu(processes), time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": question["prompt"]}, sampling)
    answer, output = None, None
    while output is None or not output.finished:
        for output in engine.step():
            if answer is None and output.outputs[0].token_ids:
                ttft = time.perf_counter() - began
                answer = {"ttft": ttft, "cpu": cpu(processes) - before}
    # Some connectors save after the request's end.
    for _ in range(3):
        engine.step()
    answer["cached"] = output.num_cached_tokens
    answer["tokens"] = list(output.outputs[0].token_ids)
    return answer


def main(model, side, folder, capacity):
    # The engine logs to stdout.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import sides

    processes = [os.getpid()]
    side = sides.SIDES[side]
    transfer = side.prepare(folder, processes, int(capacity))
    llm = start(model, transfer, side.prefix_caching)
    rest_as_a_process_does(llm)
    print(json.dumps({"ready": True}), file=out)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(ask(llm, str(number), json.loads(line), processes)), file=out)
    llm.llm_engine.engine_core.shutdown()
    side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
