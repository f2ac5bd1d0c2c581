"""`use_liger_kernel`: norms and gated MLPs by Liger's kernels (Hsu et al. 2024, arXiv 2410.10989).

    use_liger_kernel(load_reward_model("Qwen/Qwen3-0.6B", head_seed=1, device="cuda").model)

Only the forward methods of this model's modules change, not weights, exports, the attention over
trees or other models in the process (golden scores, on a CPU too). Liger's rotation would change
all models of the family, and its fused loss would replace ours: both are off.
"""

from __future__ import annotations

import sys
from typing import Any

from treeward.errors import ConfigError
from treeward.model.wrapped import WrappedModel


def use_liger_kernel(model: WrappedModel) -> None:
    """Raises `ConfigError` without liger-kernel, or without kernels for the model's family. Needs
    CUDA."""
    common: dict[str, Any] = {
        "where": "policy.use_liger_kernel",
        "fix": "set policy.use_liger_kernel=false",
    }
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as families
    except ImportError as error:
        raise ConfigError("liger-kernel cannot be imported", got=str(error), **common) from error
    family = str(model.hf.config.model_type)
    if family not in families:
        raise ConfigError(
            "Liger has no kernels for this family of models",
            got=family,
            need=f"one of {', '.join(sorted(families))}",
            **common,
        )
    # Liger also replaces classes in transformers' module of the family, for models to come.
    # They are put back, so that other models of the process compute as before.
    family_module = sys.modules[type(model.hf).__module__]
    before = dict(vars(family_module))
    apply(model=model.hf, rope=False, fused_linear_cross_entropy=False, cross_entropy=False)
    vars(family_module).update(before)
