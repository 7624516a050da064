"""Scaled dot-product attention for PyTorch: every input, every gradient, memory O(L + S).

Importing the package registers the operators ``torch.ops.attn.sdpa`` and
``torch.ops.attn.sdpa_with_weights``, of which :func:`sdpa` and :func:`sdpa_with_weights` are the
documented Python side. :mod:`torch_attn.reference` is the textbook version.
"""

from torch_attn import _library, distributed, flops, subclasses
from torch_attn.functional import sdpa, sdpa_with_weights

__all__ = ["__version__", "sdpa", "sdpa_with_weights"]

__version__ = "0.1.0"

_library.load()
flops.register()
distributed.register_when_imported()
subclasses.register_when_imported()
