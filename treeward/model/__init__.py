"""How a Hugging Face model is called.

transformers imports torchao, which warns of kernels that this machine has no use for: not in a script of ours or yours.
What it and torch import stays, so the collector is spared it meanwhile: half a second.
"""

import gc
import logging

_disabled, _collects = logging.root.manager.disable, gc.isenabled()
logging.disable(logging.WARNING)
gc.disable()
try:
    import transformers.modeling_utils  # noqa: F401
finally:
    logging.disable(_disabled)
    if _collects:
        gc.enable()
