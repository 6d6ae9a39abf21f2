"""vLLM's SimpleCPUOffloadConnector on the CPU.

It copies between a GPU and its disk's buffers with CUDA. Here memmove takes the place of that copy,
which is complete when it returns, and so its streams and events have nothing to wait for. Threads,
buffers, reads and writes are vLLM's.
"""

import ctypes

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.simple_kv_offload import disk_backend, worker


class Event:
    """An event that has happened."""

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class Stream:
    def __init__(self, priority=0):
        pass

    @staticmethod
    def priority_range():
        return 0, 0

    def wait_event(self, event):
        pass


class Cuda:
    Stream = Stream

    @staticmethod
    def current_stream():
        return Stream()


class HostTorch:
    """torch, with streams and events of the CPU."""

    Event, cuda = Event, Cuda

    def __getattr__(self, name):
        return getattr(torch, name)


def pairs(sources, destinations, stream, **_):
    """Returns the tensors to copy between, [block, byte] each."""
    return list(zip(sources.values(), destinations.values(), strict=True))


def copy(sources, destinations, tensors):
    for one, other in tensors:
        size = one.stride(0) * one.element_size()
        for source, destination in zip(sources, destinations, strict=True):
            address = other.data_ptr() + destination * size
            ctypes.memmove(address, one.data_ptr() + source * size, size)


worker.torch = disk_backend.torch = HostTorch()
disk_backend.build_params, disk_backend.copy_blocks = pairs, copy
disk_backend.pin_tensor = lambda tensor: None


class HostOffloadConnector(SimpleCPUOffloadConnector):
    """See the module's documentation."""
