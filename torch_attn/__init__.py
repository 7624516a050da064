"""Scaled dot-product attention for PyTorch: every input, every gradient, memory O(L + S).

Importing the package registers the operators ``torch.ops.attn.sdpa`` and
``torch.ops.attn.sdpa_with_weights``, of which :func:`sdpa` and :func:`sdpa_with_weights` are the
documented Python side. :mod:`torch_attn.reference` is the textbook version. :func:`replacing_sdpa`
puts :func:`sdpa` in the place of the built-in, in code that nobody changes.
"""

from torch_attn import _library, distributed, flops, replace, subclasses
from torch_attn.functional import sdpa, sdpa_with_weights
from torch_attn.replace import Replacement, replace_sdpa, replacing_sdpa

__all__ = [
    "Replacement",
    "__version__",
    "replace_sdpa",
    "replacing_sdpa",
    "sdpa",
    "sdpa_with_weights",
]

__version__ = "0.1.0"

_library.load()
flops.register()
distributed.register_when_imported()
subclasses.register_when_imported()
replace.register_with_torch()
