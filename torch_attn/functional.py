"""The operators as Python functions, with the arguments of ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import functools
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_attn import _library

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Stats", "sdpa", "sdpa_stats", "sdpa_with_logsumexp", "sdpa_with_weights"]

_library.load()


class ScoreOptions(TypedDict, total=False):
    """The options that every way to call attention has."""

    softcap: float
    window_size: tuple[int, int]
    query_offset: Tensor | int | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class StatsOptions(ScoreOptions, total=False):
    """The options of :func:`sdpa_stats`. They mean the same as for :func:`sdpa`."""

    key_lengths: Tensor | int | None


class Options(StatsOptions, total=False):
    """The options of :func:`sdpa`: its arguments that the built-in lacks."""

    key_scale: Tensor | None
    value_scale: Tensor | None


# What to use for the arguments of other libraries.
_ELSEWHERE = {
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
    "block_mask": "torch_attn.flex_attention",
    "causal": "is_causal, and query_offset=S - L where the last query is to see the last key",
    "dropout": "dropout_p",
    "key_padding_mask": "attn_mask, True where a query may attend, as mask[:, None, None, :]",
    "mask": "attn_mask",
    "need_weights": "torch_attn.sdpa_with_weights",
    "p": "dropout_p",
    "return_attn_probs": "torch_attn.sdpa_with_weights",
    "return_lse": "torch_attn.sdpa_with_logsumexp",
    "score_mod": "torch_attn.flex_attention",
    "softmax_scale": "scale",
    "window": "window_size",
}

# Their names, because torch.compile cannot read annotations.
_OF_STATS, _OF_SDPA = tuple(StatsOptions.__annotations__), tuple(Options.__annotations__)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    query_offset: Tensor | int | None = None,
    key_lengths: Tensor | int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    **others: NoReturn,
) -> Tensor:
    """Scaled dot-product attention.

    Computes ``dropout(softmax(scale * query @ key^T + attn_mask)) @ value`` for every head. It
    takes the arguments of :func:`torch.nn.functional.scaled_dot_product_attention` and replaces
    that function. Whatever the arguments are, forward and backward do not store the L x S scores.
    The kernel reads keys block by block with a running softmax, and backward computes the weights
    again.

    The built-in lacks the arguments from `softcap` on. The caller may combine these arguments in
    any way. Query i is at position p = i + `query_offset`. The score of query i and key j is
    ``softcap tanh(scale <q, k> / softcap) - alibi_slopes |p - j| + attn_mask``. `window_size`,
    `is_causal`, `key_lengths` and `attn_mask` can hide key j. A weight is
    ``exp(score) / (exp(sinks) + sum over j of exp(score))``. A key and a value of 8 bits stand for
    ``key * key_scale[..., None]`` and ``value * value_scale[..., None]``.

    Shapes: ``B...`` stands for any number of leading dimensions, including 0. They broadcast
    between query, key and value: in each dimension, all sizes other than 1 are equal. L is the
    number of queries, S the number of keys, E the size of a query and a key, Ev the size of a
    value; each may be 0. The head dimension is the third from the end. All strides are allowed: the
    kernel reads views without a copy.

    Args:
        query: ``[B..., Hq, L, E]``, at least 2-D; float64, float32, bfloat16 or float16.
        key: ``[B..., Hk, S, E]``, query's dtype and device.
        value: ``[B..., Hv, S, Ev]``, query's dtype and device.
        attn_mask: broadcasts to ``[B..., Hq, L, S]`` without enlarging that shape. In a boolean
            mask, True means that the query may attend to the key. A floating mask, of query's dtype
            or float32, is added to the scaled scores; ``-inf`` masks the key. A floating mask may
            require a gradient. The gradient has the mask's own shape. The mask may also be
            ``causal_upper_left(L, S)`` or ``causal_lower_right(L, S)`` of
            :mod:`torch.nn.attention.bias`, for which no L x S mask is made.
        dropout_p: probability, in [0, 1], of zeroing a weight; the remaining weights are divided
            by ``1 - dropout_p``. Dropout applies whenever `dropout_p` is not 0, so pass 0 in
            evaluation. Dropout draws from torch's default generator of the device, so the same
            :func:`torch.manual_seed` gives the same dropout.
        is_causal: query i attends to keys 0 ... i, even where L != S (upper left alignment). With
            `query_offset`, query i attends to keys 0 ... i + query_offset. If `attn_mask` is given
            too, both apply.
        scale: factor of the scores, of any sign; None means ``1 / sqrt(E)``.
        enable_gqa: allows Hk and Hv to be divisors of Hq. Hk and Hv may differ. ``Hq / Hk``
            neighbouring query heads share a key head, and ``Hq / Hv`` neighbouring query heads
            share a value head. No head is copied.
        softcap: c > 0 bounds scores to (-c, c), before a mask is added; 0 is off (Gemma 2).
        window_size: (left, right), how many keys a query sees to the left and right of its own
            position; -1 is all. The kernel skips tiles of 64 keys outside the window, so its
            time is linear in the window's size. (-1, 0) is causality.
        query_offset: the position of query 0 among the keys, which may be negative: one number, or
            integers ``[B...]``. ``S - L`` puts the last query at the last key (lower right
            alignment), as for a chunk of a prompt or with a cache. If only the first ``length``
            keys of a cache are filled, pass ``length - L``.
        key_lengths: how many of the S keys are used: one number, or integers ``[B...]``. The kernel
            reads neither the other keys nor their values nor their part of a mask.
        alibi_slopes: ``[Hq]`` or ``[B..., Hq]``, a slope for each query head, of query's dtype or
            float32. ALiBi subtracts the slope times the distance from each score. Differentiable.
        sinks: ``[Hq]`` or ``[B..., Hq]``, a sink for each query head, of query's dtype or float32.
            A sink is one more logit in every softmax of its head, but it has no value vector
            (gpt-oss). A sink of 0 gives softmax-1, and a sink of -inf has no effect.
            Differentiable.
        key_scale: float32, the scale of a key in int8 or float8_e4m3fn; broadcasts to key's shape
            without the last dimension: one number for each token and head, one for each head, or
            one for all (:func:`torch_attn.quantize_kv`). The kernel multiplies scores by the scale
            and makes no copy of the keys. The kernel does not read scales of keys beyond
            `key_lengths`. A key of 8 bits needs a query of float32, bfloat16 or float16. Then
            query, key and value have no derivatives.
        value_scale: the same for a value of 8 bits.
        others: none. A name of another library, such as flash-attn's `causal`, is an error that
            says what it is called here.

    Returns:
        ``[B..., Hq, L, Ev]`` in query's dtype, with the query's memory layout (a ``[B, L, H, E]``
        tensor viewed as ``[B, H, L, E]`` gives such a view again). A query that may attend to no
        key gives a row of 0 and finite gradients. If S = 0, this holds for every query.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or `dropout_p` is outside [0, 1]. The
            message names the argument, its value and what is allowed. The operator raises this
            error before a kernel runs. Offsets and lengths on a GPU are not validated, because
            validation would synchronise. Lengths on a GPU are clamped to 0 ... S.
        TypeError: query, key or value is no tensor; an offset or length is neither an int nor a
            tensor; or a float argument, such as `scale`, is given as a tensor that requires a
            gradient or has a tangent, because float arguments have no derivatives.
            ``torch.ops.attn.sdpa`` cannot raise for such a tensor, because PyTorch converts it to a
            number.
        ValueError: `is_causal` is given together with a causal bias, or `window_size` is no pair.

    Precision: for bfloat16 and float16, sums and the softmax are in float32. For float64,
    everything is in float64. Under :class:`torch.autocast`, inputs are cast as for the built-in.

    Derivatives: with respect to query, key, value, a floating `attn_mask`, `alibi_slopes` and
    `sinks`. Only requested derivatives are computed. Dropout's mask counts as constant. First and
    second derivatives take memory O(L + S), in reverse mode, in forward mode, and in one mode over
    the other. Third derivatives, and forward mode over forward mode, store the L x S scores; with
    dropout, they raise RuntimeError. :func:`torch.func.vmap` calls the operator once for all
    samples. With dropout, the operator follows vmap's argument `randomness`.

    Determinism: output and gradients have the same bits on every run and with any number of
    threads.

    NaN: a NaN in a query makes that query's row NaN, and no other row. A NaN in a key reaches the
    rows that attend to that key, and no row that masks it. A NaN in a value may reach any row of
    its head, because 0 * NaN is NaN.

    Memory: forward and backward take O(L + S) per head, in addition to inputs and outputs.

    Sources:
        - the formula: Vaswani et al., *Attention Is All You Need*, 2017,
          https://arxiv.org/abs/1706.03762
        - softmax in one pass: Milakov & Gimelshein, *Online normalizer calculation for softmax*,
          2018, https://arxiv.org/abs/1805.02867
        - backward without the L x S matrix: Rabe & Staats, *Self-attention Does Not Need O(n^2)
          Memory*, 2021, https://arxiv.org/abs/2112.05682
        - blocks, and a backward from the logsumexp of each row: Dao et al., *FlashAttention*, 2022,
          https://arxiv.org/abs/2205.14135
        - soft cap: Gemma Team, *Gemma 2*, 2024, https://arxiv.org/abs/2408.00118; ALiBi: Press et
          al., *Train Short, Test Long*, 2022, https://arxiv.org/abs/2108.12409; windows: Beltagy et
          al., *Longformer*, 2020, https://arxiv.org/abs/2004.05150; sinks: Xiao et al., *Efficient
          Streaming Language Models with Attention Sinks*, 2024, https://arxiv.org/abs/2309.17453

    Example:
        >>> query = torch.randn(2, 8, 100, 64, requires_grad=True)  # 2 texts, 8 heads, 100 queries
        >>> key, value = torch.randn(2, 2, 2, 120, 64)  # 2 heads, each for 4 heads of the query
        >>> bias = torch.zeros(8, 100, 120, requires_grad=True)  # one for both texts
        >>> output = torch_attn.sdpa(query, key, value, bias, enable_gqa=True)
        >>> output.sum().backward()
        >>> output.shape, bias.grad.shape
        (torch.Size([2, 8, 100, 64]), torch.Size([8, 100, 120]))
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        _refuse_others("attn::sdpa", query=query, key=key, value=value)
    scale = None if scale is None else _number("attn::sdpa", "scale", scale)
    dropout_p = _number("attn::sdpa", "dropout_p", dropout_p)
    plain = (query, key, value, attn_mask, dropout_p, is_causal)
    if others or not isinstance(attn_mask, (Tensor, NoneType)):
        _refuse_unknown("attn::sdpa", others, _OF_SDPA)
        _refuse_others("attn::sdpa", attn_mask=attn_mask)
    no_tensors = query_offset is None and key_lengths is None and alibi_slopes is None
    no_tensors = no_tensors and sinks is None and key_scale is None and value_scale is None
    softcap = _number("attn::sdpa", "softcap", softcap)
    output: Tensor
    if no_tensors and window_size == (-1, -1) and not softcap:
        output = torch.ops.attn.sdpa(*plain, scale=scale, enable_gqa=enable_gqa)
        return output
    options: Options = {
        "softcap": softcap,
        "window_size": window_size,
        "query_offset": query_offset,
        "key_lengths": key_lengths,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    own = _as_operators_take("attn::sdpa", query, options, _OF_SDPA)
    own |= {"scale": scale, "enable_gqa": enable_gqa, "with_rows": False}
    output = torch.ops.attn.attention(*plain, **own)[0]
    return output


def sdpa_with_logsumexp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`sdpa`, and the logsumexp and the largest score of every query.

    Arguments, errors, memory and the output are as for :func:`sdpa`. The arguments from `softcap`
    on are passed by name. The logsumexp allows a caller to merge results exactly. Let o1 and l1 be
    the output and the logsumexp over some keys, and o2 and l2 the output and the logsumexp over the
    remaining keys. Then the output over all keys is ``softmax([l1, l2]) @ [o1, o2]``, and the
    logsumexp is ``log(exp(l1) + exp(l2))``. A z-loss is ``logsumexp.square().mean()``.

    Returns:
        Three tensors:

        - output: ``[B..., Hq, L, Ev]``;
        - logsumexp: ``[B..., Hq, L]``, float32 (float64 for float64), the logsumexp of each query's
          scores and of the sink of its head, differentiable to second order. For a query without
          keys, the logsumexp is the sink, or -inf if there is no sink;
        - max_score: of the shape and dtype of logsumexp, each query's largest score, without the
          sink; -inf for a query without keys. max_score has no derivatives.

        For a query with a score of +inf, logsumexp and max_score are +inf, and the output is NaN.
        For any other query with a score of NaN, both are NaN.

    Example:
        >>> query, key, value = torch.randn(3, 4, 10, 8)  # 4 heads, 10 tokens
        >>> output, logsumexp, max_score = torch_attn.sdpa_with_logsumexp(query, key, value)
        >>> _, weights, scores = torch_attn.sdpa_with_weights(query, key, value)
        >>> bool(torch.allclose((scores - logsumexp[..., None]).exp(), weights, atol=1e-6))
        True
    """
    plain = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _three("attn::sdpa", torch.ops.attn.attention, plain, options)


def sdpa_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`sdpa`, and its matrices of weights and scores, to look at or to train on.

    Arguments, errors and the output are as for :func:`sdpa`. The arguments from `softcap` on are
    passed by name. The two matrices take memory O(L S). On the CPU a kernel computes the matrices,
    on other devices PyTorch's own operators. Gradients through the matrices may have any order. On
    every device, PyTorch's own operators compute these gradients.

    Returns:
        Three tensors, all differentiable:

        - output: ``[B..., Hq, L, Ev]``;
        - weights: ``[B..., Hq, L, S]``, after softmax and before dropout. A row sums to 1, or to
          less with a sink. The row is 0 if the query may attend to no key;
        - scores: ``[B..., Hq, L, S]``, scaled and masked, before softmax; ``-inf`` where masked.

    Example:
        >>> query, key, value = torch.randn(3, 4, 5, 8)  # 4 heads, 5 tokens
        >>> output, weights, _ = torch_attn.sdpa_with_weights(query, key, value, is_causal=True)
        >>> bool(torch.allclose(weights @ value, output, atol=1e-6))
        True
    """
    plain = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _three("attn::sdpa_with_weights", torch.ops.attn.sdpa_with_weights, plain, options)


class Stats(NamedTuple):
    """The statistics of :func:`sdpa_stats`, in float32 (float64 for float64), without derivatives.

    Attributes:
        largest_score: ``[B..., Hq, L]``, each query's largest score, scaled and masked. Scores that
            grow from step to step are the first sign of diverging training.
        entropy: ``[B..., Hq, L]``, the entropy ``-sum(p log p)`` of each query's weights ``p``, in
            nats: ``log(n)`` where n keys have equal weight, 0 where one key has all the weight.
        logsumexp: ``[B..., Hq, L]``, the logsumexp of each query's scores, and of the sink if there
            is one. A weight is ``exp(score - logsumexp)``.
        received_weight: ``[B..., Hq, S]``, the sum of the weights that all queries give to a key.
            The sum over all keys is the number of queries that see any key, minus the weights of
            the sinks.
    """

    largest_score: Tensor
    entropy: Tensor
    logsumexp: Tensor
    received_weight: Tensor

    @property
    def largest_weight(self) -> Tensor:
        """``[B..., Hq, L]``, ``exp(largest_score - logsumexp)``; 0 for a query without keys.

        If this weight is near 1, the softmax is saturated, and the gradients of query and key are
        small. For scores of 1e6 and more, this weight has few correct digits in float32.
        """
        weight = (self.largest_score - self.logsumexp).exp()
        return weight.masked_fill(self.logsumexp == -torch.inf, 0)


def sdpa_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Unpack[StatsOptions],
) -> Stats:
    """Computes statistics of attention, also for sequences too long to store the weights.

    Returns, for every head, the largest score, entropy and logsumexp of every query, and the weight
    that every key receives. While a model trains, these statistics show whether attention collapses
    to single keys, and whether scores explode. Computing the statistics takes memory O(L + S), and
    about the time of two products of queries and keys.

    Args:
        query: ``[B..., Hq, L, E]``, at least 2-D; float64, float32, bfloat16 or float16.
        key: ``[B..., Hk, S, E]``, query's dtype and device; leading dimensions broadcast.
        attn_mask: as for :func:`sdpa`: boolean, floating, or a causal bias of PyTorch.
        is_causal: query i sees keys 0 ... i. If `attn_mask` is given too, both apply.
        scale: factor of the scores, of any sign; None means ``1 / sqrt(E)``.
        enable_gqa: allows Hk to be a divisor of Hq.
        softcap, window_size, query_offset, key_lengths, alibi_slopes, sinks: as for :func:`sdpa`,
            passed by name. A sink is no score, but it is part of the logsumexp and of the softmax's
            denominator.

    Returns:
        :class:`Stats`. The statistics are computed from the scores of :func:`sdpa`. If query and
        key have a half type, the statistics are computed in float32. A query that may attend to no
        key has the largest score -inf and the entropy 0, and gives no weight to any key. Its
        logsumexp is the sink, or -inf if there is no sink.

    Raises:
        TypeError: query or key is no tensor, or `scale` is a tensor that requires a gradient or has
            a tangent.
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument, its
            value and what is allowed. A backward through the results also raises this error, and so
            does forward mode, because the results have no derivatives. Inputs may require a
            gradient as long as no backward runs. To train on these numbers, use
            :func:`sdpa_with_weights`. In a function that :func:`torch.compile` differentiates as a
            whole, detach query and key.

    Accuracy: the entropy's relative error is as small near 0 as elsewhere, because the terms of the
    entropy are never negative. The results have the same bits on every run and with any number of
    threads.

    NaN and infinity: if a query has a NaN score, its largest score, entropy and logsumexp are NaN.
    The received weight of each key that the query may attend to is NaN, too. The query does not
    make the received weights of other keys NaN. A score of -inf is masked. If a score is +inf, the
    query's largest score and logsumexp are +inf. Its entropy, and the received weight of each key
    that the query may attend to, are NaN, as from softmax.

    Source: entropy as a sign of instability: Zhai et al., *Stabilizing Transformer Training by
    Preventing Attention Entropy Collapse*, 2023, https://arxiv.org/abs/2303.06296; largest scores:
    Dehghani et al., *Scaling Vision Transformers to 22 Billion Parameters*, 2023,
    https://arxiv.org/abs/2302.05442.

    Example:
        >>> query, key = torch.randn(2, 4, 1000, 64)  # 4 heads, 1000 tokens
        >>> stats = torch_attn.sdpa_stats(query, key, is_causal=True)
        >>> stats.entropy.shape, stats.received_weight.shape
        (torch.Size([4, 1000]), torch.Size([4, 1000]))
        >>> round(stats.received_weight.sum().item())  # each of 4 x 1000 queries gives away 1
        4000
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        _refuse_others("attn::sdpa_stats", query=query, key=key)
    if not isinstance(attn_mask, (Tensor, NoneType)):
        _refuse_others("attn::sdpa_stats", attn_mask=attn_mask)
    scale = None if scale is None else _number("attn::sdpa_stats", "scale", scale)
    plain = (query, key, attn_mask, is_causal)
    own = _as_operators_take("attn::sdpa_stats", query, options, _OF_STATS)
    return Stats(*torch.ops.attn.sdpa_stats(*plain, scale=scale, enable_gqa=enable_gqa, **own))


def _refuse_script(operator: str) -> NoReturn:
    raise RuntimeError(
        f"torch_attn: torch.jit.script does not compile torch_attn's functions; call {operator} in "
        "the script, or use torch.jit.trace"
    )


# torch.jit.script calls this attribute of a function before it compiles the function.
for _function, _operator in (
    (sdpa, "torch.ops.attn.sdpa"),
    (sdpa_with_logsumexp, "torch.ops.attn.attention"),
    (sdpa_with_weights, "torch.ops.attn.sdpa_with_weights"),
    (sdpa_stats, "torch.ops.attn.sdpa_stats"),
):
    vars(_function)["__prepare_scriptable__"] = functools.partial(_refuse_script, _operator)


def _three(
    operator: str, op: Any, plain: tuple[Any, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls an operator that has three results. `plain`: the arguments of the built-in."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = plain
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        _refuse_others(operator, query=query, key=key, value=value)
    if not isinstance(attn_mask, (Tensor, NoneType)):
        _refuse_others(operator, attn_mask=attn_mask)
    own = _as_operators_take(operator, query, options, _OF_SDPA)
    own["scale"] = None if scale is None else _number(operator, "scale", scale)
    dropout_p = _number(operator, "dropout_p", dropout_p)
    results: tuple[Tensor, Tensor, Tensor] = op(
        *(query, key, value, attn_mask, dropout_p, is_causal), enable_gqa=enable_gqa, **own
    )
    return results


def _as_operators_take(
    operator: str, query: Tensor, options: Options | StatsOptions, known: tuple[str, ...]
) -> dict[str, Any]:
    """Returns these options as the operators take them. Refuses an option that is not `known`."""
    own: dict[str, Any] = {**options}
    _refuse_unknown(operator, own, known)
    if "softcap" in own:
        own["softcap"] = _number(operator, "softcap", own["softcap"])
    if "window_size" in own:
        own["window_size"] = _pair(own["window_size"])
    for name, given in own.items():
        if name in ("query_offset", "key_lengths"):
            own[name] = _integers(name, given, query)
        elif name not in ("softcap", "window_size") and not isinstance(given, (Tensor, NoneType)):
            _refuse_others(operator, **{name: given})
    return own


def _refuse_unknown(operator: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            other = _ELSEWHERE.get(name)
            here = f"use {other}" if other else f"the options are {', '.join(known)}"
            raise TypeError(f"{operator}: there is no argument {name} here; {here}")


def _pair(window_size: tuple[int, int]) -> list[int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size is {window_size!r}; it must be a pair (left, right) of ints, such as "
            "(127, 0) for 128 keys up to a query's own, or (-1, -1) for no window"
        )
    for number in window_size:
        _check_whole("window_size", number)
    return [window_size[0], window_size[1]]


def _integers(name: str, numbers: Tensor | int | None, query: Tensor) -> Tensor | None:
    """Converts a number to a tensor. Under torch.compile, the number may be symbolic."""
    if numbers is None:
        return None
    if isinstance(numbers, Tensor):
        return numbers
    example = f", such as torch.tensor({numbers})" if isinstance(numbers, list) else ""
    _check_whole(name, numbers, f" or a tensor of integers{example}")
    return torch.full([], numbers, dtype=torch.int64, device=query.device)


def _check_whole(name: str, number: Any, or_else: str = "") -> None:
    """Refuses everything except 64-bit ints and symbolic ints; refuses True and False, too."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{name} is {number!r}; it must be an int{or_else}")
    if not torch.compiler.is_compiling() and not -(2**63) <= number < 2**63:
        raise RuntimeError(f"{name} is {number}; it must be an int of 64 bits, -2^63 to 2^63 - 1")


def _refuse_others(operator: str, **tensors: Any) -> None:
    """Accepts only tensors and objects that act as a tensor, as a proxy of :mod:`torch.fx` does."""
    for name, given in tensors.items():
        if hasattr(given, "__torch_function__"):
            continue
        kind = f"{type(given).__module__}.{type(given).__qualname__}".removeprefix("builtins.")
        advice = "" if given is None else f", as torch.as_tensor({name}) makes of numbers"
        if type(given).__name__ == "BlockMask":
            advice = "; torch_attn.flex_attention takes a BlockMask, as block_mask"
        if name == "attn_mask" and isinstance(given, bool):
            advice = "; is_causal is passed by its name"
        raise TypeError(
            f"{operator}: {name} is {'None' if given is None else f'a {kind}'}; it must be a "
            f"torch.Tensor{advice}"
        )


def _number(operator: str, name: str, number: float) -> float:
    """Returns the number itself, or the number in a tensor of one element.

    Returns 0 as a constant. Otherwise ``torch.compile(dynamic=True)`` would make a default value an
    input of the graph, and dynamo fails if two activation checkpoints have that input.
    """
    if isinstance(number, float):
        return number if number else 0.0
    return _out_of_tensor(operator, name, number)


def _out_of_tensor(operator: str, name: str, number: Any) -> Any:
    """Reads the number in a tensor of one element.

    Refuses a tensor that requires a gradient or has a tangent. Reading the number breaks a graph of
    :func:`torch.compile`, as it does in the built-in.
    """
    if not isinstance(number, Tensor):
        return number
    tangent = forward_ad.unpack_dual(number).tangent  # type: ignore[no-untyped-call]
    if number.requires_grad or tangent is not None:
        advice = "; to learn it, multiply the query by it and set it to 1"
        if operator == "attn::sdpa_stats":
            advice = "; pass scale.item(): statistics have no derivatives"
        raise TypeError(
            f"{operator}: {name} is a tensor that wants a derivative and would get none; it must "
            f"be a number{advice if name == 'scale' else ''}"
        )
    return number.item()
