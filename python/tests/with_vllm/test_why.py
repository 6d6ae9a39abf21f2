"""Why tokens of a prompt were not found: a counter by reason, and a line of the log."""

import logging
import types

import pytest

pytest.importorskip("vllm")

import faults  # noqa: E402
from forked import live, metric  # noqa: E402
from prompts import BLOCK, PROMPTS, tokens, whole  # noqa: E402
from ripieno.vllm.lookups import why  # noqa: E402
from ripieno.vllm.metrics import REASONS  # noqa: E402

A, B = PROMPTS[0], tokens(290)
LOG = logging.getLogger("vllm.ripieno")


class Lines(logging.Handler):
    """Collects the lines of the log."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []
        LOG.setLevel(logging.DEBUG)
        LOG.addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def missed():
    counts = {each: metric("vllm:ripieno_missed_tokens_total", reason=each) for each in REASONS}
    looked, hit = (metric(f"vllm:ripieno_{name}_tokens_total") for name in ("lookup", "hit"))
    assert sum(counts.values()) == looked - hit, "each token has one reason"
    return counts


def by_reason(engine, prompt, **more):
    """Asks with an empty cache of vLLM's own. Returns the missed tokens of that by reason."""
    before = missed()
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    engine.ask(prompt, max_tokens=1, **more)
    return {each: n - before[each] for each, n in missed().items() if n > before[each]}


def first_life(engine):
    log, found = Lines(), {}
    found["new"] = by_reason(engine, A)
    engine.settle()
    found["stored"] = by_reason(engine, A)
    found["longer"] = by_reason(engine, A[: 5 * BLOCK] + B)
    engine.settle()
    engine.connector.catalog.evict(1000)
    found["evicted"] = by_reason(engine, A)
    engine.settle()
    engine.plane.may_go.clear()
    by_reason(engine, B[:100])
    allocated = engine.connector.allocated
    # The step may wait for the saves, if it computes into their blocks.
    engine.connector.allocated = lambda *args: (allocated(*args), engine.plane.may_go.set())
    found["saving"] = by_reason(engine, B[:100])
    engine.settle()
    found["reads no cache"] = by_reason(engine, A, prompt_logprobs=1)
    found["short"] = by_reason(engine, A[: BLOCK - 1])
    return found, log.lines


def second_life(engine):
    return by_reason(engine, A), by_reason(engine, B[:200])


def test_each_missed_token_has_a_reason(model, options):
    found, lines = live(first_life, model=model, options=options, plane=faults.Held)
    tail, rest = len(A) - whole(A), 5 * BLOCK + len(B)
    assert found == {
        "new": {"unknown": whole(A), "tail": tail},
        "stored": {"tail": tail},
        "longer": {"unknown": rest // BLOCK * BLOCK - 5 * BLOCK, "tail": rest % BLOCK},
        "evicted": {"evicted": whole(A), "tail": tail},
        "saving": {"saving": 96, "tail": 4},
        "reads no cache": {},
        "short": {},
    }
    for text in (
        f"0: of {len(A)} tokens behind vLLM's own, 0 are loaded; missed: {tail} tail, "
        f"{whole(A)} unknown; the hit ends before block ",
        f"1: of {len(A)} tokens behind vLLM's own, {whole(A)} are loaded; missed: {tail} tail",
        "6 is not looked up: it reads no cache",
        f"7 is not looked up: it has no further unit of {BLOCK} tokens",
    ):
        # vLLM adds something to a request's name.
        name, rest = text[0], text[1:]
        found = [line for line in lines if line.startswith(f"ripieno: r{name}") and rest in line]
        assert len(found) == 1, (text, lines)
    other = options | {"weights_id": "others"}
    assert live(second_life, model=model, options=other) == (
        {"elsewhere": whole(A), "tail": tail},
        # The other namespace has three of these blocks: the first one that is missing decides.
        {"elsewhere": 192, "tail": 8},
    )


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({0: "stored", 1: "unknown", 2: "unknown"}, ("incomplete", 1)),
        ({0: "evicted", 1: "unknown", 2: "stored"}, ("incomplete", 0)),
        ({0: "evicted", 1: "unknown", 2: "unknown"}, ("evicted", 0)),
        ({0: "stored", 1: "stored", 2: "stored"}, ("incomplete", 0)),
    ],
)
def test_a_hybrid_hit_ends_where_one_group_lacks_a_block(stored, reason):
    keys = lambda request, places: [bytes([group]) for group, _ in places]  # noqa: E731
    groups = types.SimpleNamespace(blocks=[1, 1, 1], is_hybrid=True, keys=keys)
    found = why(None, 3, groups, lambda key: stored[key[0]])
    assert found == (reason[0], bytes([reason[1]]))
