"""An HTTP router in front of several vLLM engines: a request goes where its prefix is.

    python -m ripieno.router.member --engine http://10.0.0.1:8000 ...   # beside each engine
    python -m ripieno.router --etcd 10.0.0.9:2379 --listen 0.0.0.0:8080

Engines are keys in etcd with a lease, which `member` holds while its engine is healthy. Their
blocks are known from vLLM's KV events. Neither is trusted: a dead engine's requests go to another
one, and a block that is not where it should be is computed. See docs/start/two-machines.md.
"""
