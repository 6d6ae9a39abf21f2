"""OpenTelemetry spans below the trace of a request, as a collector gets them from vLLM."""

import http.server
import threading

import pytest

pytest.importorskip("vllm")

from forked import live  # noqa: E402
from opentelemetry import trace  # noqa: E402
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: E402
    ExportTraceServiceRequest,
)
from prompts import PROMPTS  # noqa: E402

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def collector():
    """A collector's address, and the spans that it got: of our own instrumentation."""
    spans = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans if scope.scope.name == "ripieno" else ())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
        server.shutdown()


def attributes(span):
    values = {it.key.removeprefix("ripieno."): it.value for it in span.attributes}
    return {key: value.int_value for key, value in values.items()}


def traced(engine, prompt):
    """Stores a prompt, then loads it in a trace, and again without one. Returns the number of rows."""
    engine.ask(prompt)
    for headers in SAMPLED, None:
        engine.forget()
        engine.ask(prompt, headers=headers)
    trace.get_tracer_provider().force_flush()
    return len(engine.worker.rows)


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_a_hit_has_spans_below_the_trace_of_its_request(model, options, collector, load_async):
    address, spans = collector
    prompt = PROMPTS[0]
    rows = live(
        traced,
        prompt,
        model=model,
        options=options | {"load_async": load_async},
        environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
        otlp_traces_endpoint=address,
    )
    named = {name: [it for it in spans if it.name == name] for name in {it.name for it in spans}}
    assert all(span.trace_id.hex() == TRACE for span in spans)
    (lookup,), (load,) = named.pop("ripieno.lookup"), named.pop("ripieno.load")
    assert lookup.parent_span_id.hex() == load.parent_span_id.hex() == PARENT
    hit = attributes(lookup)["hit_tokens"]
    assert 0 < hit < len(prompt) == attributes(lookup)["tokens"]
    assert attributes(load)["tokens"] == hit and attributes(load)["rank"] == 0
    assert lookup.start_time_unix_nano < lookup.end_time_unix_nano <= load.start_time_unix_nano
    waits = named.pop("ripieno.wait", [])
    assert [attributes(wait)["layer"] for wait in waits] == ([] if load_async else [*range(rows)])
    for wait in waits:
        assert wait.parent_span_id == load.span_id
        assert load.start_time_unix_nano <= wait.start_time_unix_nano
        assert wait.end_time_unix_nano <= load.end_time_unix_nano
    assert not named, "no other spans are ours"
