"""The same prompt before and after a restart of vLLM: restart.py MODEL DIRECTORY."""

import subprocess
import sys
import time


def serve(model, directory):
    """The life of an engine: how it answers one prompt, and how fast."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        max_model_len=4096,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="RipienoConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": directory, "capacity": "1GiB"},
        ),
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    # Something else first: the first step of all takes longer.
    llm.generate({"prompt_token_ids": [7] * 100}, sampling, use_tqdm=False)
    prompt = [10 + at * at % 990 for at in range(3000)]
    (answer,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    print(
        f"{answer.num_cached_tokens:5} of {len(prompt)} tokens found,"
        f" first token after {answer.metrics.first_token_latency:.3f} s,"
        f" answer {answer.outputs[0].token_ids}",
        flush=True,
    )
    llm.llm_engine.engine_core.shutdown()


def main(model, directory):
    for life in ("first", "second"):
        since = time.monotonic()
        child = [sys.executable, __file__, model, directory, "serve"]
        done = subprocess.run(child, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        (line,) = (line for line in done.stdout.splitlines() if "tokens found" in line)
        print(f"{life} engine ({time.monotonic() - since:.0f} s): {line}")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    serve(*sys.argv[1:3]) if len(sys.argv) == 4 else main(*sys.argv[1:])
