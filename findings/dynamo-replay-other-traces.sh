#!/usr/bin/env bash
# Dynamo's replay takes a trace of Bailian's form for one of Mooncake's: 300 seconds are half a one.
#
# ai-dynamo 1.6.1, Python 3.11, its offline replay (`run_trace_replay`), by default. The trace, made
# here, has the fields of Qwen's published traces from Bailian: 200 requests of 668 tokens in 299 s,
# times in seconds, 42 hash ids of 16 tokens each, of which the first 36 are one of ten beginnings.
#
# Guess: the form is told by its fields (chat_id, parent_chat_id, type, turn), or refused: a prompt
#        of 668 tokens has two ids of 512 tokens, and here are 42.
# Seen:  neither. Too few ids for a prompt are refused, too many are dropped, here all but two, so
#        that whoever shares 512 tokens shares all. Seconds are taken for milliseconds. Of
#        trace_block_size=16 and times by 1,000 the result is as it should be; no form of trace has
#        Bailian's name.
#
#            as it is: 200 requests in 0.6 s, reused 91 %, first token after 99 ms
#            16 tokens a block: 200 requests in 0.8 s, reused 82 %, first token after 255 ms
#            and in milliseconds: 200 requests in 298.6 s, reused 82 %, first token after 18 ms
#
# For a choice of routers, workers or KV tiers by such a trace: load is 500 times too high, and what
# a cache finds is too much by half of what it misses. Convert first, and look at the duration.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install ai-dynamo-runtime==1.6.1 zstandard==0.25.0
venv/bin/pip -q install --no-deps ai-dynamo==1.6.1
cat >ask.py <<'PYTHON'
import json
import random

from dynamo.replay.api import run_trace_replay

pick = random.Random(1)
rows = []
for number in range(200):
    beginning = 1000 * pick.randrange(10)
    ids = [*range(beginning, beginning + 36), *range(10**6 + 6 * number, 10**6 + 6 * number + 6)]
    row = dict(chat_id=number, parent_chat_id=-1, timestamp=round(0.25 + 1.5 * number, 3))
    row |= dict(input_length=668, output_length=20, type="text", turn=1, hash_ids=ids)
    rows.append(row)


def replay(title, rows, **options):
    with open("trace.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    seen = run_trace_replay("trace.jsonl", **options).summary
    count, seconds = seen["completed_requests"], seen["duration_ms"] / 1000
    reused, first = 100 * seen["prefix_cache_reused_ratio"], seen["mean_ttft_ms"]
    text = f"reused {reused:.0f} %, first token after {first:.0f} ms"
    print(f"{title}: {count} requests in {seconds:.1f} s, {text}")


replay("as it is", rows)
replay("16 tokens a block", rows, trace_block_size=16)
rows = [row | {"timestamp": round(1000 * row["timestamp"])} for row in rows]
replay("and in milliseconds", rows, trace_block_size=16)
PYTHON
venv/bin/python ask.py 2>log | tee seen
cat >expected <<'TEXT'
as it is: 200 requests in 0.6 s, reused 91 %, first token after 99 ms
16 tokens a block: 200 requests in 0.8 s, reused 82 %, first token after 255 ms
and in milliseconds: 200 requests in 298.6 s, reused 82 %, first token after 18 ms
TEXT
diff expected seen && echo "as written above"
