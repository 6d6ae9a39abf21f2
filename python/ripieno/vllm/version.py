"""Raises ImportError with a one-sentence message if another version of vLLM is installed."""

from ripieno.plugin import require_vllm

require_vllm()
