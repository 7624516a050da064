"""Exports the operators to ONNX as ``Attention``, which ONNX has from opset 23 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__all__ = ["translations"]


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns the `custom_translation_table` for :func:`torch.onnx.export`; needs onnxscript.

    :func:`torch_attn.sdpa`, :func:`torch_attn.sdpa_with_logsumexp` and
    :func:`torch_attn.sdpa_with_weights` become ONNX's ``Attention`` of the exported opset, 23, 24
    or 25. The exported model must not read the second or the third result of
    :func:`torch_attn.sdpa_with_logsumexp`. ``Attention`` can express these arguments:

    ===========================  ===================================================================
    query, key, value            ``[B, H, L, E]``, with the same B; key and value have the same
                                 number of heads, which divides query's number of heads
    attn_mask                    boolean or of query's dtype; a mask with one row for all queries,
                                 or one column for all keys, is expanded to L x S
    dropout_p                    0
    is_causal, enable_gqa        any
    scale                        more than 0, rounded to float32
    softcap                      any, rounded to float32
    window_size                  any, from opset 25 on
    query_offset                 from opset 24 on, with is_causal or a window (left, 0). A runtime
                                 may refuse an offset that is less than -L or more than S - L
    key_lengths                  from opset 24 on. With is_causal or a window, the model must also
                                 pass ``query_offset=key_lengths - L``. The subtraction must be part
                                 of the exported model
    alibi_slopes, sinks          None
    cu_seq_q, ..., block_table   not given, so :func:`torch_attn.varlen_attn` cannot be exported
    ===========================  ===================================================================

    onnx 1.23 defines ``Attention`` as this package does. Earlier releases, and runtimes that follow
    earlier releases, define the same opsets differently. Before 1.22, the soft cap came after the
    mask. Before 1.23, `key_lengths` did not shift the causal mask, and a query without keys gave
    NaN.

    The softmax of half types is in float32, as in this package. For all other operations, the
    runtime chooses the precision. In the scores of :func:`torch_attn.sdpa_with_weights`,
    onnxruntime 1.32 gives hidden scores the lowest finite number, not -inf.

    Raises:
        torch.onnx.ConversionError: the export raises it if ``Attention`` cannot express a call. The
            message names the argument, its value and what is allowed.
        ModuleNotFoundError: onnxscript is not installed.

    Example:
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, query, key, value):
        ...         return torch_attn.sdpa(query, key, value, is_causal=True)
        >>> program = torch.onnx.export(
        ...     Attention().eval(),
        ...     tuple(torch.randn(3, 2, 8, 100, 64)),
        ...     dynamo=True,
        ...     opset_version=23,
        ...     custom_translation_table=torch_attn.onnx.translations(),
        ...     verbose=False,
        ... )
        >>> [node.op_type for node in program.model.graph]
        ['Attention']
    """
    import onnxscript  # noqa: F401

    ops = torch.ops.attn
    return {
        ops.sdpa.default: _sdpa,
        ops.attention.default: _sdpa_with_logsumexp,
        ops.sdpa_with_weights.default: _sdpa_with_weights,
        ops.sdpa_stats.default: _sdpa_stats,
    }


def _sdpa(*args: Any, **kwargs: Any) -> Any:
    return _attention(None, *args, **kwargs)[0]


def _sdpa_with_logsumexp(*args: Any, **kwargs: Any) -> _OutputAlone:
    return _OutputAlone([_sdpa(*args, **kwargs)])


def _sdpa_with_weights(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Makes a node for each matrix; the exporter removes the second node if it is unused."""
    output, _, _, weights = _attention(_AFTER_SOFTMAX, *args, **kwargs)
    return output, weights, _attention(_BEFORE_SOFTMAX, *args, **kwargs)[3]


def _sdpa_stats(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("attn::sdpa_stats: ONNX has no operator that gives statistics of attention")


# Values of qk_matmul_output_mode, as onnx defines them from 1.22 on.
_BEFORE_SOFTMAX, _AFTER_SOFTMAX = 2, 3


class _OutputAlone(list[Any]):
    """The output of attn::attention. Refuses to give the other results, which ONNX lacks."""

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            name = ("logsumexp", "max_score")[index - 1]
            raise ValueError(f"attn::attention: {name} is read; ONNX's Attention does not give it")
        return super().__getitem__(index)


def _refuse(name: str, given: Any, allowed: str) -> NoReturn:
    raise ValueError(f"attn: {name} is {given}; for ONNX's Attention it must be {allowed}")


def _attention(
    matrix: int | None,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    query_offset: Any = None,
    key_lengths: Any = None,
    with_rows: bool = True,
    **others: Any,  # ONNX lacks these
) -> Any:
    """Refuses what ONNX cannot express; else makes the node and returns its four results."""
    arguments = torch.ops.attn.attention.default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    for name, given in others.items():
        if given is not defaults[name] and given != defaults[name]:
            _refuse(name, given if isinstance(given, int) else "given", str(defaults[name]))

    from onnxscript import evaluator, ir, values

    recorder: Any = evaluator.default()
    opset: int = recorder.opset.version
    if opset not in (23, 24, 25):
        _refuse("opset_version", opset, "23, 24 or 25")
    if dropout_p != 0:
        _refuse("dropout_p", dropout_p, "0")
    if scale is not None and scale <= 0:
        _refuse("scale", scale, "more than 0")  # ONNX multiplies query and key by sqrt(scale)
    _check_shapes(query, key, value, attn_mask)
    half = query.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    left, right = window_size
    attributes = {
        "is_causal": int(is_causal) or None,
        "scale": scale,
        "softcap": softcap or None,
        "softmax_precision": int(ir.DataType.FLOAT) if half else None,
        "qk_matmul_output_mode": matrix,
    }
    if max(left, right) >= 0:
        if opset < 25:
            _refuse("window_size", (left, right), "(-1, -1), or opset_version 25 or more")
        attributes |= {"left_window_size": left, "right_window_size": right}

    op = values.Opset("", opset)
    inputs = [query, key, value, _written_out(op, attn_mask, query, key)]
    in_use = _keys_in_use(op, query, query_offset, key_lengths, is_causal, left, right)
    if in_use is not None:
        inputs += [None, None, in_use]
    return op.Attention(*inputs, **attributes)


def _check_shapes(query: Any, key: Any, value: Any, attn_mask: Any) -> None:
    """Refuses batches or heads that broadcast, and unequal numbers of heads of key and value.

    Compares sizes only with 1, because validate.cpp lets two sizes differ only if one of them is 1,
    or if heads are grouped.
    """
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    for name, shape in shapes.items():
        if len(shape) != 4:
            _refuse(f"{name}'s shape", list(shape), "[B, H, L, E]")
        if (shape[0] == 1) != (query.shape[0] == 1):
            _refuse(f"{name}'s batch size", shape[0], f"query's, {query.shape[0]}")
    if value.shape[1] != key.shape[1]:
        _refuse("value's number of heads", value.shape[1], f"key's, {key.shape[1]}")
    if query.shape[1] == 1 != key.shape[1]:
        _refuse("query's number of heads", 1, f"a multiple of key's, {key.shape[1]}")
    if attn_mask is not None and attn_mask.dtype.name not in ("BOOL", query.dtype.name):
        _refuse("attn_mask's dtype", attn_mask.dtype.name, f"BOOL or query's, {query.dtype.name}")


def _written_out(op: Any, attn_mask: Any, query: Any, key: Any) -> Any:
    """Expands a mask with one row or one column to L rows and S columns.

    ONNX hides the keys for which a mask has no column, and onnxruntime 1.32 requires L rows.
    """
    if attn_mask is None:
        return None
    rows, columns = (1, 1, *attn_mask.shape)[-2:]
    of_all = (rows == 1) == (query.shape[2] == 1) and (columns == 1) == (key.shape[2] == 1)
    if of_all and len(attn_mask.shape) >= 2:
        return attn_mask
    sizes = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
    return op.Expand(attn_mask, sizes)


def _keys_in_use(
    op: Any,
    query: Any,
    query_offset: Any,
    key_lengths: Any,
    is_causal: bool,
    left: int,
    right: int,
) -> Any:
    """Returns ``nonpad_kv_seqlen``, the numbers of keys in use, int64 [B], or None.

    ONNX lacks offsets: the last query is at the position of the last key in use. So this function
    expresses a `query_offset` by the number of keys in use, ``query_offset + L``. ONNX then hides
    all keys after the last query, so no query may see one of these keys.
    """
    from onnxscript import ir

    counted = is_causal or left >= 0 or right >= 0
    in_use, name = key_lengths, "key_lengths"
    if counted and key_lengths is not None:
        if not _is_difference(query_offset, key_lengths, query.shape[2]):
            given = "None" if query_offset is None else "something else"
            _refuse("query_offset beside key_lengths", given, "key_lengths - L")
    elif counted and query_offset is not None:
        if not is_causal and right != 0:
            _refuse("query_offset", "given", "None, or is_causal True, or window_size (left, 0)")
        in_use, name = query_offset, "query_offset"
    if in_use is None:
        return None
    if op.version < 24:
        _refuse(name, "given", "None, or opset_version 24 or more")
    in_use = op.Cast(in_use, to=ir.DataType.INT64)
    if name == "query_offset":
        in_use = op.Add(in_use, op.Shape(query, start=2, end=3))
    return op.Expand(in_use, op.Shape(query, start=0, end=1))


def _is_difference(query_offset: Any, key_lengths: Any, L: Any) -> bool:
    """Returns whether the program computes query_offset as key_lengths - L."""
    producer = None if query_offset is None else query_offset.producer()
    node = None if producer is None else producer.meta.get("node")
    add, sub = torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor  # n - L, or -L + n
    if node is None or node.target not in (add, sub) or node.kwargs:
        return False
    lengths, other = node.args
    if getattr(other, "target", None) == torch.ops.aten.scalar_tensor.default:  # with int32 lengths
        other = other.args[0]
    other = getattr(other, "meta", {}).get("val", other)
    if lengths.name != key_lengths.name or not isinstance(other, (int, torch.SymInt)):
        return False
    return str(other if node.target == sub else -other) == str(L)
