"""How a Hugging Face model is called.

transformers imports torchao, which warns of kernels that this machine has no use for: not in a script of ours or yours.
"""

import logging

_disabled = logging.root.manager.disable
logging.disable(logging.WARNING)
import transformers.modeling_utils  # noqa: E402, F401

logging.disable(_disabled)
