"""vLLM's tiered offloading on the CPU.

vLLM's own worker copies between a GPU and its CPU tier, and rejects a KV cache in host memory. This
one copies with memmove. Everything else, including the tiers, is vLLM's.
"""

import ctypes
import time

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    def __init__(self, kv_caches, region):
        self.region, self.ended = region, []
        self.groups = kv_caches.group_data_refs
        self.cache = [each.tensor for each in kv_caches.tensors]
        pages = [each.page_size_bytes for each in kv_caches.tensors]
        self.tier = [region.create_next_worker_view(page) for page in pages]

    def submit_store(self, job_id, src_spec, dst_spec):
        return self.move(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self.move(job_id, dst_spec, src_spec, False)

    def move(self, job, cached, tiered, is_store):
        began, moved = time.perf_counter(), 0
        ((refs, count),) = zip(self.groups, cached.group_sizes, strict=True)
        for ref in refs:
            ours, theirs = np.empty(count, np.uint64), np.empty(count, np.uint64)
            compute_sub_block_ptrs(cached.block_ids, 1, ours, self.cache[ref.tensor_idx])
            compute_sub_block_ptrs(tiered.block_ids, 1, theirs, self.tier[ref.tensor_idx])
            pair = (ours, theirs) if is_store else (theirs, ours)
            for source, destination in zip(pair[0].tolist(), pair[1].tolist(), strict=True):
                ctypes.memmove(destination, source, ref.page_size_bytes)
            moved += count * ref.page_size_bytes
        self.ended.append(TransferResult(job, True, moved, time.perf_counter() - began))
        return True

    def get_finished(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids):
        """Returns immediately: jobs complete when they are submitted."""

    def shutdown(self):
        self.tier.clear()
        self.region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if not self._worker:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
