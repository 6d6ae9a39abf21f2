"""What tests ask."""

import random

BLOCK = 32

_chance = random.Random(7)


def tokens(count):
    return [_chance.randrange(10, 2000) for _ in range(count)]


_begin = tokens(320)
# Three begin alike. All but the shortest are computed in chunks. No block closes while 24 tokens
# are generated: whatever a block of theirs is computed with is the same in each run.
PROMPTS = [_begin + tokens(100), _begin + tokens(71), _begin + tokens(7), tokens(517), tokens(38)]


def whole(prompt, block=BLOCK):
    """Tokens that can be found: whole blocks, without the last token."""
    return (len(prompt) - 1) // block * block


SHARED = [0, 320, 320, 0, 0]
"""What vLLM finds without a store when it is asked all of them."""
STORED = [whole(prompt) for prompt in PROMPTS]
"""What is found in a store."""


def alone(engine):
    """Answers and bytes, one after the other; nothing but a store remembers them."""
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
    """Answers to all at once, and how much of each prompt was cached."""
    return engine.ask(*PROMPTS)
