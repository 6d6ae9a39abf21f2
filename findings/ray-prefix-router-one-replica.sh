#!/usr/bin/env bash
# Ray Serve: its prefix-aware router sends all that comes at the same time to one of four replicas.
#
# ray 2.60.0, Python 3.11, four replicas on this machine that take half a second to answer, with
# Ray's router of two choices (the default) and its router for LLMs by prefix, by their defaults.
# One request, and after its answer 40 at the same time, of 2,000 letters that have nothing or the
# first 300 in common; shown is how many of the 40 the busiest replica got.
#
# Guess: as it is described, by prefix while load is balanced, and by load otherwise; what
#        has no prefix in common goes to the replica with the least in its cache, and so spreads.
# Seen:  load is "balanced" by default however long the queues are (imbalanced_threshold is
#        infinite). A tenth of the prompt in common, as a system prompt is, and all go where the
#        first one went, while three replicas are idle. Without, too, as "the least in its cache"
#        is the same replica for all that come before the first of them is entered.
#
#            two choices, 0 of 2000 in common: fewer than 25
#            two choices, 300 of 2000 in common: fewer than 25
#            by prefix, 0 of 2000 in common: 35 or more
#            by prefix, 300 of 2000 in common: 35 or more
#
# For prompts with one system prompt: replicas that are added get nothing. With
# imbalanced_threshold=4 and requests 50 ms apart the busiest had 15 of 40 (by hand; 40 without it,
# 11 with nothing in common). For 40 at once 8 changes nothing: queues are looked at before.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install 'ray[serve]==2.60.0' pyarrow==26.0.1
cat >ask.py <<'PYTHON'
import asyncio
import collections
import random
import sys
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

# Its public name, ray.serve.llm.request_router, is in a package that needs an engine.
BY_PREFIX = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)


@dataclass
class Request:
    prompt: str


class Engine:
    async def __call__(self, request):
        await asyncio.sleep(0.5)
        return serve.get_replica_context().replica_id.unique_id


def text(length):
    return "".join(random.choices("abcdefghij ", k=length))


ray.init(
    num_cpus=4,
    include_dashboard=False,
    logging_level="ERROR",
    log_to_driver=False,
    _temp_dir=sys.argv[1],
)
for title, options in {
    "two choices": {},
    "by prefix": {"request_router_class": BY_PREFIX},
}.items():
    engine = serve.deployment(
        Engine,
        num_replicas=4,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=100,
        request_router_config=RequestRouterConfig(**options),
    )
    application = title.replace(" ", "-")
    handle = serve.run(engine.bind(), name=application, route_prefix=None)
    for common in (0, 300):
        begin = text(common)
        handle.remote(Request(begin + text(2000 - common))).result()
        sent = [handle.remote(Request(begin + text(2000 - common))) for _ in range(40)]
        most = max(collections.Counter(each.result() for each in sent).values())
        shown = "35 or more" if most >= 35 else "fewer than 25" if most < 25 else most
        print(f"{title}, {common} of 2000 in common: {shown}", flush=True)
    serve.delete(application)
PYTHON
RAY_USAGE_STATS_ENABLED=0 venv/bin/python ask.py "$work/ray" 2>log | tee seen
cat >expected <<'TEXT'
two choices, 0 of 2000 in common: fewer than 25
two choices, 300 of 2000 in common: fewer than 25
by prefix, 0 of 2000 in common: 35 or more
by prefix, 300 of 2000 in common: 35 or more
TEXT
diff expected seen && echo "as written above"
