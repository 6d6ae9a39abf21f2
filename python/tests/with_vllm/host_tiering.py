"""vLLM's tiered offloading where the "GPU" is the host.

vLLM's own workers copy with CUDA. This copies with the CPU instead; the rest is vLLM's code.
"""

import time

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    def __init__(self, caches, blocks_per_chunk, region):
        self.groups, self.per_chunk, self.region = caches.group_data_refs, blocks_per_chunk, region
        self.pages = [entry.tensor for entry in caches.tensors]
        sizes = [entry.page_size_bytes for entry in caches.tensors]
        # [chunk, block of the chunk, byte]
        self.chunks = [
            region.create_next_worker_view(size * blocks_per_chunk).unflatten(
                1, (blocks_per_chunk, size)
            )
            for size in sizes
        ]
        self.done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, to_chunks=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, to_chunks=False)

    def _copy(self, job_id, gpu, host, to_chunks):
        start, moved = time.perf_counter(), 0
        blocks, chunks = gpu.block_ids, host.block_ids
        for refs, count, first in zip(self.groups, gpu.group_sizes, gpu.block_indices, strict=True):
            at = first % self.per_chunk + np.arange(count)
            used = -(-(first % self.per_chunk + count) // self.per_chunk) if count else 0
            chunk, inside = chunks[:used][at // self.per_chunk], at % self.per_chunk
            for ref in refs:
                page = self.pages[ref.tensor_idx][:, : ref.page_size_bytes]
                place = self.chunks[ref.tensor_idx][:, :, : ref.page_size_bytes]
                if to_chunks:
                    place[chunk, inside] = page[blocks[:count]]
                else:
                    page[blocks[:count]] = place[chunk, inside]
                moved += count * ref.page_size_bytes
            blocks, chunks = blocks[count:], chunks[used:]
        self.done.append(TransferResult(job_id, True, moved, time.perf_counter() - start))
        return True

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        """Copies are complete when submit returns."""

    def shutdown(self):
        self.pages, self.chunks = [], []
        self.region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
