"""A KV connector for vLLM (0.32, 0.33): KV cache on NVMe that survives a restart.

    --kv-transfer-config '{"kv_connector": "RipienoConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": "/var/lib/kv", "capacity": "100GiB"}}'

If the package's entry points are not installed (PYTHONPATH), also give the module's name:
"kv_connector_module_path": "ripieno.vllm".

The scheduler's process has the catalog and makes all decisions. Each worker's process has a plane
and carries them out. They communicate through vLLM's connector metadata in each step.

The options (kv_connector_extra_config) are in docs/reference/vllm.md.

A separate thread reads saves from vLLM's blocks. vLLM counts those blocks as free when the request
has ended; before it reuses one, the save of it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from . import version  # noqa: F401, I001 (before anything that another version lacks)

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import ripieno

from .groups import Groups
from .identity import namespace_of
from .layout import check, copies_of, layout_for, required_layout
from .metrics import PromMetrics, Stats
from .options import Options
from .place import place_of
from .scheduler import Scheduler
from .worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .protocol import Reports, Tasks


class RipienoConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's documentation."""

    _cache_hit_source = CacheHitSource.DISK

    @property
    def requires_kv_delivery(self) -> bool:
        # Blocks that are not stored are computed again.
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return required_layout(vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise", False))

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = Options.parse(
            self._kv_transfer_config.kv_connector_extra_config, "kv_connector_extra_config"
        )
        parallel = vllm_config.parallel_config
        try:
            self.load_async = check(vllm_config, kv_cache_config, self.options)
            self.groups = Groups(kv_cache_config, parallel)
            self.layout = layout_for(vllm_config, kv_cache_config)
            self.copies = copies_of(vllm_config, kv_cache_config, self.options)
            """Workers that have the same KV cache."""
        except ValueError as error:
            raise ValueError(f"RipienoConnector: {error}") from error
        events = vllm_config.kv_events_config
        self.has_events = events is not None and events.enable_kv_cache_events
        self.blocks: int = kv_cache_config.num_blocks
        # A row of a hybrid model has layers of several groups, which are not computed at the same
        # time.
        is_hybrid = self.groups.is_hybrid
        self.layers = {} if is_hybrid else self.layout.layers
        """The last row that a step waits for before it computes a layer. If there are none, steps
        load all rows before they compute."""
        self.computed = {} if is_hybrid else self.layout.computed
        """The row of each layer, which is stored when that is computed. If there are none, steps
        store all rows at their end."""
        if self.options.layer_times and not self.computed:
            raise ValueError("layer_times: the layers have no rows of their own; leave it out")
        rows, page = len(self.layout.rows), self.layout.page
        self.shape = ripieno.Shape(rows, 1, page, self.groups.tokens)
        self.world: int = parallel.world_size
        """Number of workers."""
        self.ranks = self.world // self.copies
        """Those of the store, each of which has a part of a block."""
        # The name holds all parameters of the files' layout. The namespace holds the rest.
        layers = rows
        if parallel.pipeline_parallel_size > 1:
            # With its own number, a rank that has others would make another store.
            layers = vllm_config.model_config.get_total_num_hidden_layers()
        name = f"tp{self.ranks}-layers{layers}-page{page}"
        name += f"-block{self.groups.tokens}"
        if parallel.pipeline_parallel_size > 1:
            name += f"-pp{parallel.pipeline_parallel_size}"
        if self.groups.is_hybrid:
            name += f"-groups{len(self.groups.sizes)}"
        # Engines of data parallelism may have the same id.
        self.engine = f"{self._kv_transfer_config.engine_id}-{parallel.data_parallel_index}"
        """Name of this engine at a server."""
        self.place = place_of(self, name)
        self._in_scheduler: Scheduler | None = None
        self._in_worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            describe = partial(namespace_of, vllm_config, kv_cache_config, self.options)
            self._in_scheduler = Scheduler(self, describe)

    # In the scheduler's process.

    @property
    def _scheduler(self) -> Scheduler:
        assert self._in_scheduler, "vLLM calls this in the scheduler's process"
        return self._in_scheduler

    def on_new_request(self, request: Request) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Tasks:
        return self._scheduler.tasks(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        self._scheduler.reported(reports, connector_output.invalid_block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.forget(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.is_pending

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    # In a worker's process.

    @property
    def _worker(self) -> Worker:
        assert self._in_worker, "vLLM calls this in a worker's process"
        return self._in_worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]) -> None:
        self._in_worker = Worker(self, kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        self._worker.wake()

    def handle_preemptions(self, kv_connector_metadata: Tasks) -> None:
        self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        # The second model runner has no context for a FULL graph.
        is_full = forward_context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        self._worker.start_loads(bool(forward_context.attn_metadata) and not is_full)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.finish_loads()
        self._worker.finish_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        return None, self._worker.finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._worker.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> Reports | None:
        return self._worker.take_reports()

    # In both.

    def get_kv_connector_stats(self) -> Stats | None:
        half = self._in_scheduler or self._in_worker
        return half.take_stats() if half else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> PromMetrics:
        return PromMetrics(*args)

    def shutdown(self) -> None:
        half = self._in_scheduler or self._in_worker
        if half is not None:
            half.close()
