"""Prompts of the tests."""

import random

BLOCK = 32

# On the CPU vLLM makes the buffers between the ranks of a pipeline when it warms up, which it does
# not if it is eager. Nothing is compiled: see conftest.py.
WARM = {"enforce_eager": False, "compilation_config": {"mode": 1}}
PIPELINE = {"pipeline_parallel_size": 2} | WARM
RANKS = [{"tensor_parallel_size": 2}, PIPELINE]

_chance = random.Random(7)


def tokens(count):
    return [_chance.randrange(10, 2000) for _ in range(count)]


_begin = tokens(320)
# Three share a prefix. All but the shortest are computed in chunks. No block becomes full while 24
# tokens are generated, so each block is computed in the same way in each run.
PROMPTS = [_begin + tokens(100), _begin + tokens(71), _begin + tokens(7), tokens(517), tokens(38)]


def whole(prompt, block=BLOCK):
    """Returns how many tokens can be found: whole blocks, without the last token."""
    return (len(prompt) - 1) // block * block


SHARED = [0, 320, 320, 0, 0]
"""Tokens that vLLM's own prefix cache has of each prompt, without a store."""
STORED = [whole(prompt) for prompt in PROMPTS]
"""Tokens of each prompt that are found in a store."""


def alone(engine):
    """Returns answers and KV bytes of each prompt; vLLM's own cache is reset after each."""
    answers = []
    for prompt in PROMPTS:
        (said,), (cached,) = engine.ask(prompt)
        answers.append((said, cached, engine.pages()))
        engine.forget()
    return answers


def together(engine):
    said, cached = engine.ask(*PROMPTS)
    pages = engine.pages()
    return [(*each, pages) for each in zip(said, cached, strict=True)]


def tokens_of(engine):
    """Runs all prompts together. Returns their answers and each prompt's cached tokens."""
    return engine.ask(*PROMPTS)
