#!/usr/bin/env bash
# SGLang's benchmark replays Mooncake's traces with a quarter of their tokens, nearly all the same.
#
# sglang 0.5.23, Python 3.11: what `sglang.bench_serving --dataset-name mooncake` sends for three
# requests, by its own generator and its own count. The tokenizer, made here, has " hi" as a token,
# as tokenizers of language models have.
#
# Guess: a prompt has the trace's `input_length`, made of a text of 512 tokens for each hash id, as
#        Mooncake's traces mean it, so that prefix caches hit as in the trace.
# Seen:  `input_length` is not used. A hash id is its number and 128 times the word hi. Which blocks
#        are shared is right, but blocks have some 130 tokens, more with longer numbers, so
#        they do not end where blocks of an engine end. Times are milliseconds, as they should be.
#
#            input_length 6144, sent 1568, " hi" 97 %
#            input_length 6200, sent 1698, " hi" 97 %
#            input_length 30000, sent 7678, " hi" 98 %
#            of all tokens of the trace: 26 %
#
# For tiers of KV cache: the working set is a quarter of the trace's, so a tier seems four times as
# large as it is, and a load competes with the prefill of a quarter of the tokens. What compresses
# or deduplicates KV cache sees one token over and over.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install numpy==2.3.5 requests==2.32.5 tqdm==4.67.1 transformers==5.19.0
venv/bin/pip -q download --no-deps sglang==0.5.23
# Only these modules: the package itself needs a GPU's PyTorch.
unzip -q sglang-*.whl 'sglang/benchmark/utils.py' 'sglang/benchmark/datasets/[cm]o*.py'
cat >ask.py <<'PYTHON'
import asyncio

from sglang.benchmark.datasets.mooncake import get_mooncake_request_over_time
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

model = Tokenizer(models.BPE())
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
model.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
model.train_from_iterator(["hi hi hi Tell me a story based on this context. Round user:"], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
lengths = (6144, 6200, 30000)
trace = [
    {
        "timestamp": 100 * number,
        "input_length": length,
        "output_length": 10,
        "hash_ids": list(range(-(-length // 512))),
    }
    for number, length in enumerate(lengths)
]


async def main():
    sent = []
    async for request in get_mooncake_request_over_time(trace, tokenizer, 1.0, 1):
        tokens = tokenizer.tokenize(request.prompt)
        share = 100 * tokens.count("\u0120hi") / len(tokens)
        length = lengths[len(sent)]
        print(f'input_length {length}, sent {request.prompt_len}, " hi" {share:.0f} %')
        sent.append(request.prompt_len)
    print(f"of all tokens of the trace: {100 * sum(sent) / sum(lengths):.0f} %")


asyncio.run(main())
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
input_length 6144, sent 1568, " hi" 97 %
input_length 6200, sent 1698, " hi" 97 %
input_length 30000, sent 7678, " hi" 98 %
of all tokens of the trace: 26 %
TEXT
diff expected seen && echo "as written above"
