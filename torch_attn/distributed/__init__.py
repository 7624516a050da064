"""Attention over several processes.

- The operators take :class:`torch.distributed.tensor.DTensor`, sharded over batch, heads and
  sequences.
- :func:`sdpa` takes a sequence that is cut into blocks, one plain tensor on each process.
- :func:`context_parallel` runs a whole model over sequences that are spread over processes.
- :func:`method` chooses how the processes communicate.
"""

from torch_attn.distributed._context import context_parallel
from torch_attn.distributed._dtensor import register, register_when_imported
from torch_attn.distributed._methods import method
from torch_attn.distributed._sdpa import sdpa

__all__ = ["context_parallel", "method", "register", "register_when_imported", "sdpa"]
