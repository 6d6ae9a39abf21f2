#!/usr/bin/env bash
# Routers of SGLang and vLLM: `cache_aware` sends different prompts, one at a time, to one worker.
#
# sglang-router 0.3.2 and vllm-router 0.1.17, Python 3.11, each with four workers made here that
# answer at once. 40 random prompts, each after the answer to the last one, to /v1/completions.
#
# Guess: what has no prefix in common with anything goes to the worker with the most room in its
#        cache, so that prompts are spread. Token IDs, which engines take in place of a text, are
#        routed by prefix like text.
# Seen:  it goes to the worker with the fewest requests in flight, and among equals always to the
#        same one, which differs from start to start. SGLang's router refuses token IDs.
#
#            sglang-router, texts: HTTP {200}, by worker 40 0 0 0
#            vllm-router, token IDs: HTTP {200}, by worker 40 0 0 0
#            sglang-router, token IDs: HTTP {422}, by worker 0 0 0 0
#
# For a comparison of KV tiers behind a router with one client, or few: all prompts compete for one
# worker's cache, a quarter of what there is, and three workers measure nothing. Benchmarks that
# send token IDs, to be sure of lengths, do not get through one of them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install sglang-router==0.3.2 vllm-router==0.1.17
cat >ask.py <<'PYTHON'
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORKERS, PROMPTS = 4, 40
served = [0] * WORKERS


def worker(number):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, body):
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.answer({"status": "ok", "model_path": "m", "object": "list", "data": []})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            served[number] += 1
            choice = {"index": 0, "text": "a", "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "x", "object": "text_completion", "model": "m", "created": 1}
            self.answer(answer | {"choices": [choice], "usage": usage})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def post(url, prompt):
    body = json.dumps({"model": "m", "max_tokens": 1, "prompt": prompt}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def wait_for(url):
    for _ in range(600):
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{url} does not answer")


def show(title, command, prompt):
    served[:] = [0] * WORKERS
    port = free_port()
    options = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--prometheus-port", str(free_port()), "--worker-urls"]
    options += [worker(number) for number in range(WORKERS)]
    with open("log", "w") as log:
        router = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        time.sleep(2)
        url = f"http://127.0.0.1:{port}/v1/completions"
        states = {post(url, prompt(random.Random(number))) for number in range(PROMPTS)}
    finally:
        router.terminate()
        router.wait()
    print(f"{title}: HTTP {states}, by worker", *sorted(served, reverse=True))


def text(numbers):
    return "".join(numbers.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(2000))


def tokens(numbers):
    return [numbers.randrange(100_000) for _ in range(500)]


sglang, vllm = ["venv/bin/smg", "launch"], ["venv/bin/vllm-router"]
show("sglang-router, texts", sglang, text)
show("vllm-router, token IDs", vllm, tokens)
show("sglang-router, token IDs", sglang, tokens)
PYTHON
venv/bin/python ask.py | tee seen
cat >expected <<'TEXT'
sglang-router, texts: HTTP {200}, by worker 40 0 0 0
vllm-router, token IDs: HTTP {200}, by worker 40 0 0 0
sglang-router, token IDs: HTTP {422}, by worker 0 0 0 0
TEXT
diff expected seen && echo "as written above"
