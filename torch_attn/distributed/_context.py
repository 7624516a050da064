"""The switch that spreads the sequences of a whole model over processes."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_attn.distributed._layout import Layout, Piece, arguments
from torch_attn.distributed._sdpa import all_rows, attend, group_of
from torch_attn.replace import replace_sdpa

__all__ = ["Batch", "answer", "answering", "context_parallel", "is_on"]


class Batch(dict[str, Tensor]):
    """What :func:`context_parallel` yields: this process's part of each tensor, by name."""

    def __init__(self, group: dist.ProcessGroup, length: int) -> None:
        super().__init__()
        self.calls = 0
        pieces = Layout.head_and_tail(length, group.size())
        self.group, self.layout = group, Layout(group.rank(), pieces, pieces)

    @property
    def own(self) -> list[Piece]:
        """This process's pieces of the sequence."""
        return self.layout.queries[self.layout.rank]

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns this process's part of a tensor that has the whole sequence in `dim`."""
        return torch.cat([tensor.narrow(dim, a, b - a) for a, b in self.own], dim)

    def join(self, tensor: Tensor) -> Tensor:
        """Joins all parts ``[..., L_r, X]`` to ``[..., L, X]`` in order, on all processes.

        Differentiable.
        """
        length = Layout.length(self.own)
        if tensor.ndim < 3 or tensor.shape[-2] != length:
            raise ValueError(
                f"torch_attn.distributed.context_parallel: join of {list(tensor.shape)}; process "
                f"{self.layout.rank} has {length} tokens, it must be [B, {length}, X]"
            )
        parts = [tensor] * self.layout.world
        return all_rows(self.group, self.layout.queries, self.layout.rank, parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Computes an attention of the model over the tokens of all processes."""
        self.calls += 1
        name = "torch_attn.distributed.context_parallel"
        numbers = arguments("attention", of_tensors=False)
        takes = {*numbers, "alibi_slopes", "sinks"} - {"dropout_p", "max_q", "max_k"}
        for refused, given in options.items():
            as_usual = not isinstance(given, Tensor) and given == numbers.get(refused)
            if refused not in takes and not as_usual:
                raise RuntimeError(
                    f"{name}: an attention of the model has {refused}, but its tokens are those of "
                    "all processes, which take causality, a window, a soft cap, slopes and sinks"
                )
        length = Layout.length(self.own)
        if (query.shape[-2], key.shape[-2]) != (length, length):
            raise RuntimeError(
                f"{name}: process {self.layout.rank} has {length} tokens, but query is "
                f"{list(query.shape)} and key {list(key.shape)}"
            )
        taken = {n: options[n] for n in takes}
        return attend(self.layout, self.group, query, key, value, **taken)


@contextlib.contextmanager
def context_parallel(mesh: Any = None, **tensors: Tensor) -> Iterator[Batch]:
    """Runs a model over sequences whose tokens are spread over processes.

    Within the block, each attention of the model attends to the tokens of all processes. The model
    may call ``F.scaled_dot_product_attention`` or :mod:`torch_attn`. A model of transformers may
    also use :func:`torch_attn.integrations.transformers.register`. All other layers must work on
    each token alone. A process has one piece near the head of the sequence and one piece near the
    tail. This balances the work under causality. Every process must pass the same whole tensors,
    and must call the model equally often. Each process gets its own part of the tensors.

    Args:
        mesh: a :class:`~torch.distributed.device_mesh.DeviceMesh` of one dimension, or a process
            group; None means all processes.
        tensors: ``[B, L, ...]`` each, cut along dimension 1. If `labels` are among the tensors, as
            for models of transformers, the dictionary also has `shift_labels`, the label of the
            next token at each place, and `num_items_in_batch`, the number of labels on all
            processes.

    Yields:
        A dictionary with this process's part of each tensor, to pass to the model. The dictionary
        also has `position_ids`, ``[1, L_r]``: the places of the process's tokens in the whole
        sequence. The dictionary's ``cut(tensor, dim)`` returns this process's part of another
        tensor, and its ``join(tensor)`` joins the parts of all processes to ``[B, L, X]``. Loss and
        gradients are this process's share: the shares of all processes add up to the whole loss and
        gradient. Within the block, :func:`torch_attn.sdpa_with_logsumexp` returns None in place of
        the logsumexp and in place of the largest scores.

    Raises:
        ValueError: tensors of different lengths, fewer than two tokens per process, or position_ids
            or attention_mask among the tensors.
        RuntimeError: within the block, an attention with a mask, an offset, lengths, dropout,
            weights or statistics, or an attention with more or fewer tokens than this process's
            part, as with a cache.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> x = torch.randn(1, 10, 8)
        >>> with torch_attn.distributed.context_parallel(x=x) as batch:
        ...     heads = batch["x"].unflatten(-1, (2, 4)).transpose(1, 2)
        ...     output = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        >>> output.shape, batch["position_ids"].shape
        (torch.Size([1, 2, 10, 4]), torch.Size([1, 10]))
        >>> dist.destroy_process_group()
    """
    name = "torch_attn.distributed.context_parallel"
    lengths = {n: t.shape[1] if t.ndim > 1 else None for n, t in tensors.items()}
    if len({*lengths.values()}) != 1 or None in lengths.values():
        given = ", ".join(f"{n} is {list(t.shape)}" for n, t in tensors.items()) or "no tensor"
        raise ValueError(f"{name}: {given}; give tensors of shape [B, L, ...] with one L")
    for refused in {"position_ids", "attention_mask"} & tensors.keys():
        raise ValueError(
            f"{name}: {refused} is given; positions are those in the sequence, padding goes to its "
            "end, where causality hides it, and packed sequences are not supported"
        )
    group = group_of(name, mesh.get_group() if hasattr(mesh, "get_group") else mesh)
    length = next(iter(tensors.values())).shape[1]
    batch = Batch(group, length)
    if length < 2 * group.size():
        raise ValueError(
            f"{name}: {length} tokens over {group.size()} processes; it takes two of each or more"
        )
    labels = tensors.get("labels")
    if labels is not None and labels.ndim != 2:
        raise ValueError(f"{name}: labels is {list(labels.shape)}; it must be [B, L]")
    if labels is not None:  # transformers takes these two as well
        tensors["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=-100)
        batch["num_items_in_batch"] = (tensors["shift_labels"] != -100).sum()
    device = next(iter(tensors.values())).device
    tensors["position_ids"] = torch.arange(length, device=device)[None]
    batch.update({n: batch.cut(t) for n, t in tensors.items()})
    fast = torch.backends.mha.get_fastpath_enabled()
    handle = replace_sdpa()
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path has its own attention
    try:
        with answering(batch):
            yield batch
        if batch.calls == 0:
            warnings.warn(
                f"{name}: no attention was spread over processes: the block has none or computes "
                'its own, as nn.MultiheadAttention with need_weights, or models that are "eager"',
                stacklevel=3,  # frames of contextlib
            )
    finally:
        handle._take_back()  # without its warning, because batch.calls counts here
        torch.backends.mha.set_fastpath_enabled(fast)


def _forget_compiled() -> None:
    """Discards compiled code, because code compiled for one process cannot attend over several."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def is_on() -> bool:
    """Whether some thread of this process is within a context_parallel, ours or torch's."""
    return bool(_answering)


_answering: list[Any] = []


@contextlib.contextmanager
def answering(calls: Any) -> Iterator[None]:
    """Within the block, ``calls.attend`` answers all calls of attn::sdpa and attn::attention.

    The other operators raise an error.
    """
    _forget_compiled()
    torch.ops.attn._over_processes(1)
    _answering.append(calls)
    try:
        yield
    finally:
        torch.ops.attn._over_processes(-1)
        _answering[:] = [others for others in _answering if others is not calls]
        _forget_compiled()


def answer(*args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
    """Answers a call of attn::attention with the result of ``calls.attend`` (:func:`answering`)."""
    arguments = torch.ops.attn._attend_over_processes.default._schema.arguments
    call = {a.name: a.default_value for a in arguments}
    call |= dict(zip(call, args, strict=False)) | kwargs
    del call["with_rows"]
    return _answering[-1].attend(**call), None, None


_library: Any = torch.library.Library("attn", "IMPL")  # type: ignore[no-untyped-call]
_library.impl(  # an earlier import of the package may have done the same
    "_attend_over_processes", answer, "CompositeImplicitAutograd", allow_override=True
)
