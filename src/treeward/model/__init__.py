"""How a Hugging Face model is called.

transformers imports torchao, which warns of kernels that this machine has no use for: not in a
script of ours or yours. What it and torch import stays: the collector is spared it meanwhile, and
in the process of a command for ever, where nothing else is lost to it. That is two seconds of a
short command.
"""

import gc
import logging
import sys

_disabled, _collects = logging.root.manager.disable, gc.isenabled()
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
