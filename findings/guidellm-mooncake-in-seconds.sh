#!/usr/bin/env bash
# GuideLLM takes the milliseconds of Mooncake traces for seconds: a replay is 1,000 times too slow.
#
# guidellm 0.8.1 with PyTorch 1.13.1 of Debian 12, Python 3.11, against a server made here that
# notes when requests arrive. The trace has three requests, with timestamps 0, 5 and 10.
#
# Guess: `--data kind=mooncake` knows the form of Mooncake's paper and public traces. Its blocks of
#        512 tokens are the default; its times are in milliseconds: all three requests at once.
# Seen:  seconds. Neither the manual nor the log says so. time_scale=0.001 in --data helps.
#
#            seconds after the first request, as-is: 0 5 10
#            seconds after the first request, scaled: 0 0 0
#
# For a comparison of KV tiers by a public trace: an hour of it takes six weeks. If only its first
# minutes are replayed, each request finds an idle engine, no queue, and nothing to evict.
set -euo pipefail
work=$(mktemp -d)
servers=
trap 'kill $servers 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
export HF_HOME=$work/hub HF_HUB_OFFLINE=1
python3 -m venv venv
venv/bin/pip -q install datasets==5.2.0 transformers==5.19.0 click==8.4.2 culsans==0.10.0 \
    eval_type_backport faker ftfy 'httpx[http2]' jinja2 loguru more-itertools msgpack protobuf \
    pydantic pydantic-settings pyyaml rich sanic tabulate uvloop websockets
venv/bin/pip -q install --no-deps guidellm==0.8.1
# PyTorch is only imported, for its data loader.
mapfile -t packages < <(apt-get install -s -q --no-install-recommends --reinstall python3-torch \
    2>/dev/null | awk '/^Inst/ { print $2 }' | sort -u)
apt-get -q download "${packages[@]}" >/dev/null 2>&1
for package in *.deb; do dpkg -x "$package" system; done
rm ./*.deb
libraries=$work/system/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$libraries:$work/system/lib/x86_64-linux-gnu:$work/system/usr/lib
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$libraries/blas:$libraries/lapack
echo "$work/system/usr/lib/python3/dist-packages" >venv/lib/python3.11/site-packages/torch.pth

cat >trace.jsonl <<'JSON'
{"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]}
{"timestamp": 5, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 3]}
{"timestamp": 10, "input_length": 1600, "output_length": 2, "hash_ids": [0, 1, 4, 5]}
JSON
cat >tokens.py <<'PYTHON'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
tokenizer.train_from_iterator(["words of a few letters and of many"], trainer)
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("tokens")
PYTHON
cat >server.py <<'PYTHON'
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        self.answer(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))

    def do_POST(self):
        print(time.time(), flush=True)
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}
        self.answer(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
PYTHON
venv/bin/python tokens.py >/dev/null 2>&1
replay() {
    until [ -s "$1" ]; do sleep 0.1; done
    venv/bin/guidellm run --backend "kind=openai_http,target=http://127.0.0.1:$(head -1 "$1")" \
        --profile kind=replay --tokenizer kind=hf_auto,model=tokens --disable-console \
        --data "kind=mooncake,source.kind=json_file,source.path=trace.jsonl$2" \
        --output "kind=json,path=$1.json" >"$1.log" 2>&1 || { tail -5 "$1.log"; return 1; }
}
python3 server.py >as-is &
servers=$!
python3 server.py >scaled &
servers="$servers $!"
replay scaled ,time_scale=0.001 &
scaled=$!
replay as-is ''
wait $scaled
for path in as-is scaled; do
    tail -n +2 $path | sort | awk -v title="$path" '
        { if (NR == 1) first = $1; times = times " " 5 * int(($1 - first) / 5 + 0.5) }
        END { print "seconds after the first request, " title ":" times }'
done | tee seen
cat >expected <<'TEXT'
seconds after the first request, as-is: 0 5 10
seconds after the first request, scaled: 0 0 0
TEXT
diff expected seen && echo "as written above"
