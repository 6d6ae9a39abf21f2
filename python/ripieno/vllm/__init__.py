"""A KV connector for vLLM (0.32): KV cache on NVMe, found again after a restart.

    --kv-transfer-config '{"kv_connector": "RipienoConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ripieno.vllm",
        "kv_connector_extra_config": {"path": "/var/lib/kv", "capacity": "100GiB"}}'

The scheduler's process has the catalog, and decides. Each worker's process has a plane, and does as
it is told. What passes between them is vLLM's connector metadata, each step.

Options (kv_connector_extra_config):
- path: a directory on a local file system with direct I/O.
- capacity: bytes on the disk for all ranks, such as "100GiB"; allocated at once.
- devices: files of each rank, each with a software controller. 1.
- load_async: load between steps, instead of layer by layer in the step that needs the blocks.
- save_decode: store what was generated, too. true.
- weights_id: what tells the weights from others of the same model name and revision.
"""

import os

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import ripieno

from .layout import check, namespace_of, rows_of
from .options import parse_bytes
from .scheduler import Scheduler
from .worker import Worker

OPTIONS = {"path", "capacity", "devices", "load_async", "save_decode", "weights_id"}


class RipienoConnector(KVConnectorBase_V1):
    """See the module's documentation."""

    _cache_hit_source = CacheHitSource.DISK

    @property
    def requires_kv_delivery(self):
        # What is not stored is computed again.
        return False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        if unknown := set(options) - OPTIONS:
            raise ValueError(
                f"kv_connector_extra_config: {', '.join(sorted(unknown))} is unknown; there are "
                f"{', '.join(sorted(OPTIONS))}"
            )
        if missing := {"path", "capacity"} - set(options):
            raise ValueError(f"kv_connector_extra_config: {', '.join(sorted(missing))} is missing")
        check(vllm_config, kv_cache_config)
        self.load_async = bool(options.get("load_async", False))
        self.save_decode = bool(options.get("save_decode", True))
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size = spec.block_size
        # Several hashes a block: the last one closes it.
        self.hashes = self.block_size // (kv_cache_config.hash_block_size or self.block_size)
        self.rows = rows_of(kv_cache_config)
        self.shape = ripieno.Shape(len(self.rows), 1, self.rows[0].bytes, self.block_size)
        parallel = vllm_config.parallel_config
        self.world = parallel.world_size
        # What the files' layout depends on. All else is in the namespace.
        name = f"tp{self.world}-layers{len(self.rows)}-page{self.rows[0].bytes}"
        name += f"-block{self.block_size}"
        if parallel.data_parallel_size > 1:
            name += f"-dp{parallel.data_parallel_rank}"
        self.path = os.path.join(options["path"], name)
        # Workers are started before the scheduler; whoever comes first makes it.
        self.ranks = ripieno.prepare(
            self.path,
            self.shape,
            ranks=self.world,
            capacity=parse_bytes(options["capacity"]),
            devices=int(options.get("devices", 1)),
        )
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(self, namespace_of(vllm_config, kv_cache_config, options))
        else:
            self._worker = None

    # In the scheduler's process.

    def on_new_request(self, request):
        self._scheduler.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._scheduler.tasks(scheduler_output)

    def update_connector_output(self, connector_output):
        reports = connector_output.kv_connector_worker_meta
        if reports is not None:
            self._scheduler.reported(reports, connector_output.invalid_block_ids)

    def request_finished(self, request, block_ids):
        self._scheduler.forget(request.request_id)
        return False, None

    def reset_cache(self):
        self._scheduler.reset()
        return True

    # In a worker's process.

    def register_kv_caches(self, kv_caches):
        self._worker = Worker(self, kv_caches)

    def start_load_kv(self, forward_context, **kwargs):
        self._worker.begin(self._get_connector_metadata())
        # Without layers' hooks (a FULL graph, or no forward pass): before everything else.
        if not forward_context.attn_metadata:
            self._worker.finish_loads()

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

    def shutdown(self):
        if self._role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        elif self._worker is not None:
            self._worker.close()
