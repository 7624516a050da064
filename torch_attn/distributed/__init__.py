"""Attention over several processes.

- :class:`torch.distributed.tensor.DTensor`, sharded over batch and heads: no communication.
- :func:`sdpa`, of a sequence that is cut into blocks, one on each process.
"""

from torch_attn.distributed._placements import register, register_when_imported
from torch_attn.distributed._ring import sdpa

__all__ = ["register", "register_when_imported", "sdpa"]
