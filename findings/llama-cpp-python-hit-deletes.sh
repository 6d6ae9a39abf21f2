#!/usr/bin/env bash
# llama-cpp-python: its disk cache deletes what it finds, and holds 1 GiB whatever its capacity.
#
# llama-cpp-python 0.3.36, diskcache 5.6.3, numpy 2.3.5, Python 3.11. Its caches of KV states run as
# they are in the package; of the rest, which needs a build of llama.cpp, only `LlamaState` and the
# comparison of prefixes. A state of 2,000 tokens is asked for; then 24 states of 64 MiB are stored.
#
# Guess: LlamaDiskCache is LlamaRAMCache on disk: a hit leaves the state there, as the newest, and
#        `capacity_bytes` (2 GiB by default) is the limit of what it holds.
# Seen:  a hit takes the state out of the file, also if the model then has no use for it because it
#        has computed a longer prefix. A question is answered from disk once. And beside its own
#        limit there is that of diskcache, 1 GiB, which it does not set: of 24 states in a cache of
#        4 GiB the first ten are gone, without a word.
#
#            LlamaRAMCache: asked three times: found found found
#            LlamaDiskCache: asked three times: found nothing nothing
#            LlamaRAMCache, 4 GiB: 24 of 24 states of 64 MiB
#            LlamaDiskCache, 4 GiB: 14 of 24 states of 64 MiB
#
# For KV cache on SSD below llama.cpp: a prefix that several requests share is loaded for the first
# of them only, and is gone if the process ends before the answer is stored. A larger drive changes
# nothing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install diskcache==5.6.3 numpy==2.3.5 scikit-build-core==1.1.2 \
    typing-extensions==4.15.0
venv/bin/pip -q download --no-deps --no-build-isolation --no-binary :all: llama-cpp-python==0.3.36
tar -xzf llama_cpp_python-0.3.36.tar.gz --strip-components=1 llama_cpp_python-0.3.36/llama_cpp
cat >ask.py <<'PYTHON'
import ast
import contextlib
import os
import sys
import types

import numpy as np

# The module of the model without the model: it needs llama.cpp's library.
tree = ast.parse(open("llama_cpp/llama.py").read())
classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
wanted = ("longest_token_prefix",)
model = classes["Llama"]
model.body = [it for it in model.body if getattr(it, "name", "") in wanted]
body = [ast.parse("from typing import *\nimport numpy as np\nimport numpy.typing as npt").body]
part = ast.Module([*body[0], classes["LlamaState"], model], [])
package, llama = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama")
package.__path__ = ["llama_cpp"]
package.llama = llama
sys.modules |= {"llama_cpp": package, "llama_cpp.llama": llama}
exec(compile(part, "llama_cpp/llama.py", "exec"), llama.__dict__)
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

SIZE = 64 << 20


def state(tokens):
    return llama.LlamaState(np.array(tokens), np.zeros((1, 1)), len(tokens), bytes(SIZE), SIZE, 0)


def answers(cache, tokens):
    for _ in range(3):
        try:
            yield "found" if cache[tokens].n_tokens == len(tokens) else "another"
        except KeyError:
            yield "nothing"


def caches(capacity):
    yield LlamaRAMCache(capacity)
    yield LlamaDiskCache(f"cache-{capacity}", capacity)


with contextlib.redirect_stderr(open(os.devnull, "w")):
    for cache in caches(2 << 30):
        tokens = list(range(2000))
        cache[tokens] = state(tokens)
        print(f"{type(cache).__name__}: asked three times:", *answers(cache, tokens))
    for cache in caches(4 << 30):
        for number in range(1, 25):
            cache[[number] * 100] = state([number] * 100)
        held = sum([number] * 100 in cache for number in range(1, 25))
        print(f"{type(cache).__name__}, 4 GiB: {held} of 24 states of 64 MiB")
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
LlamaRAMCache: asked three times: found found found
LlamaDiskCache: asked three times: found nothing nothing
LlamaRAMCache, 4 GiB: 24 of 24 states of 64 MiB
LlamaDiskCache, 4 GiB: 14 of 24 states of 64 MiB
TEXT
diff expected seen && echo "as written above"
