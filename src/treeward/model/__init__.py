"""How a Hugging Face model is called.

transformers imports torchao, which warns of kernels that this machine has no use for: the warning
is switched off. What transformers and torch import stays until the process ends. So the garbage
collector does not look at it while it is imported, and in the process of a command never. That
saves two seconds of a short command.
"""

import gc
import logging
import sys

_disabled = logging.root.manager.disable
_collects = gc.isenabled()
logging.disable(logging.WARNING)
gc.disable()
try:
    import transformers.modeling_utils  # noqa: F401

    if "treeward.cli.main" in sys.modules:
        gc.freeze()
finally:
    logging.disable(_disabled)
    if _collects:
        gc.enable()
