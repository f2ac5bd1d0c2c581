"""How a Hugging Face model is called.

transformers imports torchao, which warns of kernels that this machine has no use for: not in a script of ours or yours.
"""

import logging

_disabled = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    import transformers.modeling_utils  # noqa: F401
finally:
    logging.disable(_disabled)
