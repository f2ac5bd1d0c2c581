"""`use_liger_kernel`: norms, rotary embeddings and gated MLPs by Liger's kernels (Hsu et al. 2024, arXiv 2410.10989).

    use_liger_kernel(load_reward_model("Qwen/Qwen3-0.6B", head_seed=1, device="cuda").model)

Only forward methods change, and, for all models of the family in the process, the function that rotates: weights,
exports and the attention over trees stay as they are. Liger's fused loss is off: treeward computes its own.
"""

from __future__ import annotations

from typing import Any

from treeward.errors import ConfigError
from treeward.model.wrapped import WrappedModel


def use_liger_kernel(model: WrappedModel) -> None:
    """Raises `ConfigError` where there is no CUDA, no liger-kernel, or no kernels for the model's family."""
    common: dict[str, Any] = {"where": "policy.use_liger_kernel", "fix": "set policy.use_liger_kernel=false"}
    if model.device.type != "cuda":
        raise ConfigError("Liger's kernels need a GPU", got=str(model.device), need="a CUDA device", **common)
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as families
    except ImportError as error:
        raise ConfigError("liger-kernel cannot be imported", got=str(error), **common) from error
    family, need = str(model.hf.config.model_type), f"one of {', '.join(sorted(families))}"
    if family not in families:
        raise ConfigError("Liger has no kernels for this family of models", got=family, need=need, **common)
    apply(model=model.hf, fused_linear_cross_entropy=False, cross_entropy=False)
