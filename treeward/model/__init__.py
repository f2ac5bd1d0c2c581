"""How a Hugging Face model is called.

transformers imports torchao, which warns of kernels that this machine has no use for: not in a script of ours or yours.
What it and torch import stays, so the collector is spared it: a second and a half of each short command.
"""

import gc
import logging

_disabled, _collects = logging.root.manager.disable, gc.isenabled()
logging.disable(logging.WARNING)
gc.disable()
import transformers.modeling_utils  # noqa: E402, F401

gc.freeze()
if _collects:
    gc.enable()
logging.disable(_disabled)
