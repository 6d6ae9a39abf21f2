"""Counters for vLLM's log and for Prometheus, under the names of the stores' own metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

import ripieno

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HELP = {name: help for name, _, help in ripieno.METRICS}
COUNTERS = (
    "lookup_tokens hit_tokens loaded_blocks loaded_bytes stored_blocks stored_bytes evicted_blocks "
    "dropped_blocks load_failures save_failures checksum_mismatches"
).split()
REASONS = "unknown evicted saving elsewhere incomplete absent declined tail".split()
"""Why tokens were missed: docs/reference/vllm.md."""
MISSED = {f"missed_tokens_{reason}": reason for reason in REASONS}
"""By name here: the label of the counter missed_tokens."""
GAUGES = ("capacity_blocks", "used_blocks", "pending_blocks", "healthy")
HISTOGRAMS = ("load_seconds", "load_wait_seconds", "save_seconds", "compute_saved_seconds")
BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Stats(KVConnectorStats):
    """Counters, gauges (the latest value) and histograms (lists of seconds), by name."""

    data: dict[str, Any]

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a counter."""
        if by:
            assert name in COUNTERS or name in MISSED, name
            self.data[name] = self.data.get(name, 0) + by

    def show(self, name: str, value: int) -> None:
        """Sets a gauge."""
        assert name in GAUGES, name
        self.data[name] = value

    def observe(self, name: str, seconds: float) -> None:
        """Adds to a histogram."""
        assert name in HISTOGRAMS, name
        self.data.setdefault(name, []).append(seconds)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Stats) -> Stats:
        data = dict(self.data)
        for name, value in other.data.items():
            data[name] = value if name in GAUGES or name not in data else data[name] + value
        return Stats(data)

    def reduce(self) -> dict[str, int | float]:
        """Returns values for the log: counters, means, and the health if it is 0."""
        data = {name: value for name, value in self.data.items() if name in (*COUNTERS, *MISSED)}
        if not self.data.get("healthy", 1):
            data["healthy"] = 0
        for name in HISTOGRAMS:
            if seconds := self.data.get(name):
                data[f"mean_{name}"] = round(sum(seconds) / len(seconds), 6)
        return data

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:ripieno_*` of each engine. The prefix makes LLM.get_metrics() return them, and vLLM
    unregister them for the next engine in a process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds: list[tuple[Sequence[str], type[Any], dict[str, Any]]] = [
            (COUNTERS, self._counter_cls, {}),
            (GAUGES, self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
            (HISTOGRAMS, self._histogram_cls, {"buckets": BUCKETS}),
        ]
        self.metrics: dict[tuple[int, str], Any] = {}
        """By engine and name: a counter, gauge or histogram of prometheus_client."""
        for names, kind, more in kinds:
            for name in names:
                metric = kind(f"vllm:ripieno_{name}", HELP[name], labelnames=labelnames, **more)
                for engine, values in per_engine_labelvalues.items():
                    self.metrics[engine, name] = metric.labels(*values)
        name, labels = "missed_tokens", [*labelnames, "reason"]
        metric = self._counter_cls(f"vllm:ripieno_{name}", HELP[name], labelnames=labels)
        for engine, values in per_engine_labelvalues.items():
            for name, reason in MISSED.items():
                self.metrics[engine, name] = metric.labels(*values, reason)
            self.metrics[engine, "healthy"].set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self.metrics[engine_idx, name]
            if name in COUNTERS or name in MISSED:
                metric.inc(value)
            elif name in GAUGES:
                metric.set(value)
            else:
                for seconds in value:
                    metric.observe(seconds)
