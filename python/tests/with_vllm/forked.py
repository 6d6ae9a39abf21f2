"""Engines for tests: vLLM on the CPU, each in a process of its own that is forked from this one.

vLLM is imported once, here, so a child becomes an engine within a second. Faults of a child, or
injected into it, end with it.
"""

import contextlib
import faulthandler
import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    # More threads would wait for each other on a busy machine.
    "OMP_NUM_THREADS": "1",
    # The n-gram proposer uses one. With more, a step took 0.2 s beside another engine.
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM kills workers, with what they store, 5 seconds after the end by default: a busy machine's
    # disk takes longer.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": os.environ.get("RIPIENO_SECONDS", "600"),
    # In one process, so that a test can step its engine.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import faults  # noqa: E402
import prometheus_client  # noqa: E402
import torch  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
from prompts import BLOCK  # noqa: E402
from ripieno.vllm import cost  # noqa: E402
from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402



def register(scan=current_platform.register_triton_kernel_overrides):
    """Has vLLM scan all modules for kernels, by an attribute of their values' __dict__. llvmlite's
    library has no such dictionary, but a function of any name: it is hidden from the scan, if
    LMCache or another one has imported it before."""
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    scan()
    if hidden:
        sys.modules["llvmlite.binding.ffi"] = hidden


# Once, here: it is two thirds of a child's start.
register()
type(current_platform).register_triton_kernel_overrides = lambda *_: None
# vLLM would look at a model's class in a process that imports vLLM again, to spare CUDA: 8 seconds.
registry._run_in_subprocess = lambda body: body()
# Each child would set the loggers of all modules, and import these.
with contextlib.suppress(ImportError):
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.model_executor.layers.quantization.compressed_tensors.utils
    import vllm.model_executor.layers.quantization.online.base  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    configure_logging(LoggingConfig())
# vLLM collects garbage several times at its start and twice at its end, when the process ends
# anyway: a second of each child.
gc.collect()
gc.freeze()
gc.collect = lambda *_: 0

SECONDS = int(os.environ.get("RIPIENO_SECONDS", "600"))
"""Time after which a child process hangs, on any machine."""


@dataclass
class Answer:
    """Result of a request."""

    tokens: list = field(default_factory=list)
    cached: int | None = None
    """Tokens of the prompt that were not computed."""
    finished: bool = False
    output: Any = None


class Engine:
    """vLLM in this process. options: the connector's, which is left out without them; role: its
    kv_role; args: vLLM's."""

    def __init__(
        self, model, options=None, policy="fail", module="ripieno.vllm", role="kv_both", **args
    ):
        # The default gives up on saves after 10 s, which a busy machine's disk can take.
        own = {"drain_seconds": SECONDS}
        if "server" not in (options or {}):
            own["capacity"] = "32MiB"
        transfer = options and KVTransferConfig(
            kv_connector="RipienoConnector",
            kv_role=role,
            kv_connector_module_path=module,
            kv_connector_extra_config=own | options,
            kv_load_failure_policy=policy,
        )
        defaults = {
            "model": str(model),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 96,
            "enforce_eager": True,
            # Longer prompts are computed in chunks.
            "max_num_batched_tokens": 256,
            "prefix_caching_hash_algo": "sha256",
            "kv_transfer_config": transfer,
        }
        config = EngineArgs(**(defaults | args)).create_engine_config()
        # vLLM sets "spawn" on the CPU: such processes import vLLM again, without the faults.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.llm = LLMEngine.from_vllm_config(config)
        self.answers = {}

    # The rest needs an engine in this process.

    @property
    def core(self):
        return self.llm.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def connector(self):
        """The scheduler's half of our connector."""
        return self.scheduler.connector._scheduler

    @property
    def worker(self):
        """The worker's half of our connector."""
        return get_kv_transfer_group()._worker

    @property
    def plane(self):
        return faults.Plane.made[-1]

    @property
    def caches(self):
        """KV cache of each layer: [block, ...]."""
        return self.runner.kv_caches

    @property
    def runner(self):
        return self.core.model_executor.driver_worker.worker.model_runner

    def add(self, prompt, name=None, salt=None, lora=None, headers=None, hints=None, **sampling):
        """Adds a request and returns its name. Greedy sampling, 24 tokens by default."""
        name = name or f"r{len(self.answers)}"
        defaults = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "detokenize": False}
        tokens = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        self.answers[name] = Answer()
        params = SamplingParams(**(defaults | sampling))
        self.llm.add_request(
            name, tokens, params, lora_request=lora, trace_headers=headers, kv_hints=hints
        )
        return name

    def step(self):
        for output in self.llm.step():
            tokens = [list(one.token_ids) for one in output.outputs]
            tokens = tokens[0] if len(tokens) == 1 else tokens
            self.answers[output.request_id] = Answer(
                tokens, output.num_cached_tokens, output.finished, output
            )

    def run(self):
        while self.llm.has_unfinished_requests():
            self.step()

    def ask(self, *prompts, **more):
        """Runs all prompts together. Returns their tokens and each prompt's cached tokens."""
        names = [self.add(prompt, **more) for prompt in prompts]
        self.run()
        answers = [self.answers[name] for name in names]
        return [answer.tokens for answer in answers], [answer.cached for answer in answers]

    def settle(self):
        """Waits until all computed blocks are stored."""
        until = time.monotonic() + SECONDS
        while self.scheduler.has_requests():
            assert time.monotonic() < until, "loads or saves do not end"
            self.step()
        ours = getattr(self.scheduler.connector, "_scheduler", None)
        gave_up = ours and ours.saves and not ours.dead
        assert not gave_up, "the connector did not wait for the saves"

    def forget(self):
        """Empties vLLM's own prefix cache, so that blocks are found in the store only."""
        self.settle()
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def blocks(self, only=None):
        """Returns each block's bytes in each layer of its group, by its key; the oldest first.

        only: numbers of blocks, or all.
        """
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        pool = self.scheduler.kv_cache_manager.block_pool
        found = {}
        for key, block in pool.cached_block_hash_to_block._cache.items():
            block = block if hasattr(block, "block_id") else next(iter(block.values()))
            if only is not None and block.block_id not in only:
                continue
            names = groups[int.from_bytes(key[-4:])].layer_names
            found[key] = [
                cache[block.block_id].contiguous().view(torch.uint8).numpy().tobytes()
                for name in names
                for cache in self.caches_of(name)
            ]
        return found

    def caches_of(self, layer):
        """Returns a layer's KV cache, or its states: [block, ...]."""
        cache = self.runner.compilation_config.static_forward_context[layer].kv_cache
        return [cache] if isinstance(cache, torch.Tensor) else list(cache)

    def pages(self, only=None):
        """Returns the digest of each block's bytes in all layers, by its key."""
        blocks = self.blocks(only).items()
        return {key: hashlib.sha256(b"".join(pages)).hexdigest() for key, pages in blocks}

    def close(self):
        self.llm.engine_core.shutdown(timeout=SECONDS)


def metric(name, **labels):
    """Returns the value of this process's Prometheus sample, or None."""
    for family in prometheus_client.REGISTRY.collect():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


@dataclass
class Life:
    """Result of a process."""

    value: Any
    said: str
    """All of its output."""
    error: str | None
    """Traceback or reason, if it failed."""
    signal: int


def live(body, *args, environment=None, plane=faults.Plane, catalog=faults.Catalog, **settings):
    """Returns body(engine, *args), run on an engine with these settings that is then shut down."""
    life = life_of(body, *args, environment=environment, plane=plane, catalog=catalog, **settings)
    # If it hung, the log from the stacks on: the innermost call comes first.
    since = life.said.find("Timeout (")
    said = life.said[since:][:9000] if since >= 0 else life.said[-6000:]
    # The error comes first: a log of CI may leave out the end of a long message.
    assert life.error is None, f"{life.error}\n{said}"
    # pytest shows it if the test fails.
    print(said)
    return life.value


def life_of(
    body,
    *args,
    environment=None,
    plane=faults.Plane,
    catalog=faults.Catalog,
    declines=False,
    **settings,
):
    """Same as live, but returns a Life: also the engine's output, its error and its signal.

    declines: whether a hit is computed if loading it would take longer. It depends on the machine.
    """
    result, into = Pipe(duplex=False)
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.setsid()
            # A script's background jobs ignore it, and vLLM ends its processes with it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            # Other modules of tests have added some.
            logger = logging.getLogger("vllm")
            del logger.handlers[1:]
            logger.handlers[0].stream = sys.stdout
            # Log all threads' stacks if it hangs.
            faulthandler.dump_traceback_later(SECONDS, file=log, exit=True)
            os.environ |= environment or {}
            faults.install(plane, catalog)
            if not declines:
                cost.Cost.is_declined = lambda *_: False
            try:
                engine = Engine(**settings)
                value = body(engine, *args)
                engine.close()
                into.send((value, None))
            except BaseException:
                into.send((None, traceback.format_exc()))
            sys.stdout.flush()
            os._exit(0)
        into.close()
        value, error = None, "it was killed"
        with contextlib.suppress(EOFError):
            late = None, f"{SECONDS} seconds passed"
            value, error = result.recv() if result.poll(SECONDS + 10) else late
        # Kill it with all processes that it started.
        if error is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        log.seek(0)
        said = log.read().decode(errors="replace")
    return Life(value, said, error, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
