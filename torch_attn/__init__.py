"""Scaled dot-product attention for PyTorch: every input, every derivative, memory O(L + S).

Importing the package registers the operators ``torch.ops.attn.sdpa`` and
``torch.ops.attn.sdpa_with_weights``.
"""

from torch_attn import _library

__version__ = "0.1.0"

_built_with = _library.load()
