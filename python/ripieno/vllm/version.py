"""Says in one sentence that another version of vLLM is installed, when it is imported."""

from ripieno.plugin import require_vllm

require_vllm()
