"""Measures layer times by step shape offline: `python -m ripieno.vllm.profile`.

vLLM runs prompts of each length after prefixes of each length, which are in its own prefix cache,
and generates with several requests at once; the connector's option layer_times records the layer
times. `ripieno bench table --layer-times` turns them into a slack table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM, EngineArgs
    from vllm.config import VllmConfig

TOKENS = range(10, 1000)
"""Token ids of prompts; every model has them."""
DECODED = 16
"""Tokens generated per request to measure decoding."""


def lengths(text: str) -> list[int]:
    """Parses numbers separated by commas."""
    return [int(each) for each in text.split(",")]


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, EngineArgs]:
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    about = str(__doc__).split("\n\n")[1].replace("\n", " ")
    parser = FlexibleArgumentParser(
        prog="python -m ripieno.vllm.profile",
        description=f"{about} Options of vLLM's engine are taken, too.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    own = parser.add_argument_group("what is measured")
    own.add_argument("--out", required=True, help="file to which lines are appended")
    own.add_argument("--inputs", type=lengths, default="128,512,2048", help="tokens of prompts")
    own.add_argument("--prefixes", type=lengths, default="0,1024,4096,16384", help="tokens before")
    own.add_argument("--decode-batches", type=lengths, default="1,8", help="requests at once")
    own.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    hint = "directory for a store that is removed (default: that of --out)"
    own.add_argument("--scratch", default=argparse.SUPPRESS, help=hint)
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1 or min(args.inputs + args.decode_batches) < 1 or min(args.prefixes) < 0:
        parser.error("--inputs, --decode-batches, --rounds: from 1 on; --prefixes: from 0 on")
    return args, EngineArgs.from_cli_args(args)


def start(args: argparse.Namespace, engine: EngineArgs, scratch: str) -> LLM:
    """Starts vLLM with the connector, which stores almost nothing: storing would affect times."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = {"path": scratch, "capacity": "1GiB", "save_backlog": 0, "piecewise": True}
    given = {each.name: getattr(engine, each.name) for each in dataclasses.fields(engine)}
    return LLM(
        **given
        | {
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_transfer_config": KVTransferConfig(
                kv_connector="RipienoConnector",
                kv_connector_module_path="ripieno.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=options | {"layer_times": os.path.abspath(args.out)},
            ),
        }
    )


def plan(args: argparse.Namespace, config: VllmConfig) -> Iterator[tuple[str, int, int, bool]]:
    """Yields the points, and True for those that fit: prompts (input) and decoding (generating)."""
    cache = config.cache_config
    most = config.model_config.max_model_len
    room = (cache.num_gpu_blocks or 0) * cache.block_size or most
    for prefix in args.prefixes:
        for tokens in args.inputs:
            yield "input", tokens, prefix, prefix + tokens + 1 <= most
        for requests in args.decode_batches:
            # Decoding needs at least one token before it.
            total = max(prefix, 1) + DECODED
            fits = total <= most and requests * (total + cache.block_size) <= room
            fits &= requests <= config.scheduler_config.max_num_seqs
            yield "generating", requests, prefix, fits


class Sweep:
    """Runs prompts of random tokens, so that only intended prefixes are found."""

    def __init__(self, llm: LLM, seed: int = 1) -> None:
        from vllm import SamplingParams

        self.llm, self.chance = llm, random.Random(seed)
        self.sampling: Callable[[int], SamplingParams] = lambda tokens: SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )

    def tokens(self, count: int) -> list[int]:
        return self.chance.choices(TOKENS, k=count)

    def ask(self, prompts: list[list[int]], tokens: int = 1) -> None:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(asked, self.sampling(tokens), use_tqdm=False)

    def measure(self, kind: str, count: int, prefix: int) -> None:
        if kind == "generating":
            self.ask([self.tokens(max(prefix, 1)) for _ in range(count)], DECODED)
            return
        before = self.tokens(prefix)
        if before:
            self.ask([before])
        self.ask([before + self.tokens(count)])


def main(argv: list[str] | None = None) -> None:
    from tqdm import tqdm

    args, engine = parse(argv)
    where = getattr(args, "scratch", os.path.dirname(os.path.abspath(args.out)))
    with tempfile.TemporaryDirectory(dir=where, prefix="ripieno-profile-") as scratch:
        llm = start(args, engine, scratch)
        points = []
        for kind, count, prefix, fits in plan(args, llm.llm_engine.vllm_config):
            if fits:
                points.append((kind, count, prefix))
            else:
                limits = "max_model_len, max_num_seqs or KV cache"
                text = f"{kind} {count} after {prefix} does not fit into {limits}"
                print(f"left out: {text}", file=sys.stderr)
        if not points:
            raise SystemExit("nothing fits; give smaller --inputs, --prefixes, --decode-batches")
        sweep = Sweep(llm)
        rounds = itertools.product(range(args.rounds), points)
        # disable=None: on a terminal only.
        for _, point in tqdm(rounds, total=args.rounds * len(points), unit="run", disable=None):
            sweep.measure(*point)
        llm.llm_engine.engine_core.shutdown()
    print(f"{args.out}: ripieno bench table --layer-times {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
