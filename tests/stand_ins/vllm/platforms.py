"""Which device vLLM computes on; the stand-in says that there is a GPU."""

from types import SimpleNamespace

current_platform = SimpleNamespace(device_type="cuda", is_cuda_alike=lambda: True)
