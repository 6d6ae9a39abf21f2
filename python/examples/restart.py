"""Serves a prompt, restarts vLLM, and serves the prompt again: its KV cache is found on the disk.

    python restart.py [DIRECTORY]

The store is in the directory (/var/tmp/ripieno-example), and so is a tiny random model, which is
made there.
"""

import pathlib
import subprocess
import sys
import time

import tiny_model


def serve(directory: pathlib.Path) -> None:
    """Runs an engine: prints how fast it answers a prompt, and how much of it was found."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=str(directory / "model"),
        max_model_len=4096,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="RipienoConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": str(directory / "store"), "capacity": "1GiB"},
        ),
    )
    sampling = SamplingParams(max_tokens=8, temperature=1, seed=1, ignore_eos=True)
    # Something else first: the first step of all takes longer.
    llm.generate("Warm up. " * 10, sampling, use_tqdm=False)
    prompt = " ".join(f"{at} times {at} is {at * at}." for at in range(140))
    (answer,) = llm.generate(prompt, sampling, use_tqdm=False)
    print(
        f"{answer.num_cached_tokens:5} of {len(answer.prompt_token_ids)} tokens found,"
        f" first token after {answer.metrics.first_token_latency:.3f} s,"
        f" answer {answer.outputs[0].token_ids}",
        flush=True,
    )
    llm.llm_engine.engine_core.shutdown()


def main(directory: pathlib.Path) -> None:
    if not (directory / "model").exists():
        tiny_model.make(directory / "model")
    for engine in ("first", "second"):
        since = time.monotonic()
        command = [sys.executable, __file__, str(directory), "serve"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        (line,) = (line for line in done.stdout.splitlines() if "tokens found" in line)
        print(f"{engine} engine ({time.monotonic() - since:.0f} s): {line}")


if __name__ == "__main__":
    if len(sys.argv) > 3 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    place = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "/var/tmp/ripieno-example")
    serve(place) if len(sys.argv) == 3 else main(place)
