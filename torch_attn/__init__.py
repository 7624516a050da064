"""Scaled dot-product attention for PyTorch: every input, every gradient, memory O(L + S).

Importing the package registers the operators ``torch.ops.attn.sdpa`` and
``torch.ops.attn.sdpa_with_weights``, of which :func:`sdpa` and :func:`sdpa_with_weights` are the
documented Python side. :mod:`torch_attn.reference` is the textbook version.
:class:`torch_attn.nn.MultiheadAttention` is torch's module on top of them, and :func:`convert` puts
it into an existing model.
"""

from torch_attn import _library, distributed, flops, nn, subclasses
from torch_attn._convert import convert
from torch_attn.functional import sdpa, sdpa_with_weights

__all__ = ["__version__", "convert", "nn", "sdpa", "sdpa_with_weights"]

__version__ = "0.1.0"

_library.load()
flops.register()
distributed.register_when_imported()
subclasses.register_when_imported()
