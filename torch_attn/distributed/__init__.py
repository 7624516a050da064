"""Attention over several processes.

- :class:`torch.distributed.tensor.DTensor`, sharded over batch, heads and sequences: the operators
  take them.
- :func:`sdpa`, of a sequence that is cut into blocks, plain tensors, one on each process.
- :func:`context_parallel`: a whole model over sequences that are spread over processes.
- :func:`method`: how they communicate.
"""

from torch_attn.distributed._context import context_parallel
from torch_attn.distributed._dtensor import register, register_when_imported
from torch_attn.distributed._methods import method
from torch_attn.distributed._sdpa import sdpa

__all__ = ["context_parallel", "method", "register", "register_when_imported", "sdpa"]
