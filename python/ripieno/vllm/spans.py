"""OpenTelemetry spans, below the trace that a request came with.

vLLM passes on a client's trace headers and exports spans if it has --otlp-traces-endpoint; requests
without headers have no spans. `ripieno.lookup` is the scheduler's lookup of a prompt, `ripieno.load`
a load by one rank, and `ripieno.wait`, its child, the time that a step waited for a layer of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    # vLLM without tracing: it has no headers either.
    trace = None

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def begin(
    name: str,
    parent: Mapping[str, str] | Span | None,
    start: int | None = None,
    **attributes: Any,
) -> Span | None:
    """Begins a span, at `start` (nanoseconds since 1970) or now. Returns None without a parent."""
    if not parent or trace is None:
        return None
    if isinstance(parent, Mapping):
        context = TraceContextTextMapPropagator().extract(parent)
    else:
        context = trace.set_span_in_context(parent)
    named = {f"ripieno.{key}": value for key, value in attributes.items()}
    return trace.get_tracer("ripieno").start_span(name, context, attributes=named, start_time=start)


def end(span: Span | None, error: str | None = None, at: int | None = None) -> None:
    """Ends a span, at `at` or now, as failed if there is an error."""
    if span is None:
        return
    if error is not None:
        span.set_status(trace.StatusCode.ERROR, error)
    span.end(at)
