"""A KV connector for vLLM (0.32): KV cache on NVMe, found again after a restart.

    --kv-transfer-config '{"kv_connector": "RipienoConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": "/var/lib/kv", "capacity": "100GiB"}}'

Where the package's entry points are not installed (PYTHONPATH), give its name too:
"kv_connector_module_path": "ripieno.vllm".

The scheduler's process has the catalog, and decides. Each worker's process has a plane, and does as
it is told. What passes between them is vLLM's connector metadata, each step.

Options (kv_connector_extra_config):
- path: a directory on a local file system with direct I/O.
- capacity: bytes of KV cache for all that the directory has, such as "100GiB"; allocated at once. A
  store keeps its size.
- devices: files of each rank, each with a software controller; or drives that are bound to
  vfio-pci, such as ["vfio:0000:65:00.0"], of which each rank gets as many. 1.
- engines: how many engines share the directory and its capacity: --data-parallel-size, which
  engines of a dense model are not told. vLLM's.
- overwrite: what drives may lose when the store is made: "nothing", "store" (another store of ours)
  or "anything". "nothing".
- executor: who runs the I/O kernel, "host" or "cuda". "cuda" if the KV cache is on a GPU, where it
  has to be; never run on a GPU yet.
- io_sms: SMs of the GPU that the I/O kernel runs on. 4.
- route: the way of the data, "direct", "staged" or "host": serving fails to start without it. The
  best that is proven; the log says which, and why not a better one.
- dram: bytes of host memory of each rank in which blocks are kept beside the drives. 0.
- dram_mode: which ones, "write-through" (what is stored, loaded or read ahead) or "read-ahead".
  "write-through".
- load_async: load between steps (true), or layer by layer in the step that needs the blocks
  (false): a layer is loaded while those before it are computed. false; true with
  kv_load_failure_policy "recompute" on vLLM's second model runner, where it is the only one that
  works (vLLM's issue 49250).
- save_decode: store what was generated, too. true.
- save_backlog: how many blocks may be on their way to the store, as a share of the KV cache's. What
  is more waits, and is dropped if its request ends before. 0.5.
- schedule: loads go before saves: a layer's save starts when nothing is being loaded, and few are in
  flight, unless vLLM waits for it or half of save_backlog is on its way. false.
- shutdown: what is done at the end with what is on its way: "drain" or "drop". "drain". Without
  requests, "drop" does not wait either: what the store has not told of by then is told of in the
  next step.
- drain_seconds: how long "drain" takes at the most. 10. With more than one worker vLLM gives them
  VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS.
- keep_on_reset: keep everything when vLLM resets its caches, as it does before weights change and
  when it sleeps. false.
- piecewise: ask vLLM for piecewise CUDA graphs, so that loads layer by layer overlap in all steps;
  without, a step with a FULL graph waits for its loads first. false.
- weights_id: what tells the weights from others of the same model name and revision.
- layer_times: a file to which each step appends what it computed and how long a layer took, for
  `ripieno profile --layer-times`. Off.

Saves are read from vLLM's blocks on a thread of their own. vLLM counts those blocks as free when
the request has ended; when it wants one for something else, the save of it ends first.
"""

import os
from functools import partial

from . import version  # noqa: F401, I001 (before anything that another version lacks)

from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import ripieno
from ripieno import capacity

from .identity import namespace_of
from .layout import check, engines_of, rows_of, tokens_of
from .metrics import PromMetrics, Stats
from .options import Options
from .scheduler import Scheduler
from .worker import Worker


class RipienoConnector(KVConnectorBase_V1):
    """See the module's documentation."""

    _cache_hit_source = CacheHitSource.DISK

    @property
    def requires_kv_delivery(self):
        # What is not stored is computed again.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return bool(extra_config.get("piecewise", False))

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        self.load_async = check(vllm_config, kv_cache_config, self.options)
        events = vllm_config.kv_events_config
        self.has_events = events is not None and events.enable_kv_cache_events
        self.blocks = kv_cache_config.num_blocks
        parallel = vllm_config.parallel_config
        self.block_size, self.hashes = tokens_of(kv_cache_config, parallel)
        self.rows = rows_of(kv_cache_config)
        self.shape = ripieno.Shape(len(self.rows), 1, self.rows[0].bytes, self.block_size)
        self.world = parallel.world_size
        # What the files' layout depends on. All else is in the namespace.
        name = f"tp{self.world}-layers{len(self.rows)}-page{self.rows[0].bytes}"
        name += f"-block{self.block_size}"
        engines = engines_of(parallel, self.options)
        if engines > 1:
            name += f"-dp{parallel.data_parallel_index}"
        self.path = os.path.join(self.options.path, name)

        # Workers are started before the scheduler; whoever comes first makes it.
        def make(bytes):
            return ripieno.prepare(
                self.path,
                self.shape,
                ranks=self.world,
                capacity=bytes,
                devices=self.options.devices,
                overwrite=self.options.overwrite,
            )

        self.ranks = capacity.made_in(
            self.options.path, name, self.options.capacity, make, engines
        )
        self._scheduler = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            describe = partial(namespace_of, vllm_config, kv_cache_config, self.options)
            self._scheduler = Scheduler(self, describe)

    # In the scheduler's process.

    def on_new_request(self, request):
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._scheduler.tasks(scheduler_output)

    def update_connector_output(self, connector_output):
        reports = connector_output.kv_connector_worker_meta
        self._scheduler.reported(reports, connector_output.invalid_block_ids)

    def request_finished(self, request, block_ids):
        self._scheduler.forget(request)
        return False, None

    def has_pending_push_work(self):
        return self._scheduler.is_pending

    def take_events(self):
        return self._scheduler.take_events()

    def reset_cache(self):
        return self._scheduler.reset()

    # In a worker's process.

    def register_kv_caches(self, kv_caches):
        self._worker = Worker(self, kv_caches)

    def handle_preemptions(self, kv_connector_metadata):
        self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        # The second model runner has no context for a FULL graph.
        is_full = forward_context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        self._worker.start_loads(bool(forward_context.attn_metadata) and not is_full)

    def wait_for_layer_load(self, layer_name):
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._worker.save_layer(layer_name)

    def wait_for_save(self):
        self._worker.finish_loads()
        self._worker.finish_saves()

    def get_finished(self, finished_req_ids):
        return None, self._worker.finished()

    def get_block_ids_with_load_errors(self):
        return self._worker.take_invalid()

    def build_connector_worker_meta(self):
        return self._worker.take_reports()

    # In both.

    def get_kv_connector_stats(self):
        half = self._scheduler or self._worker
        return half.take_stats() if half else None

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args):
        return PromMetrics(*args)

    def shutdown(self):
        half = self._scheduler or self._worker
        if half is not None:
            half.close()
