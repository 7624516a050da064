"""Attention as a module: :class:`torch.nn.MultiheadAttention`, computed by attn."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from torch_attn._count import count
from torch_attn.functional import _integers, sdpa, sdpa_with_weights
from torch_attn.varlen import PackedSequences

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.MultiheadAttention):
    """Attention of several heads between learned projections, in place of torch's own module.

    It is a :class:`torch.nn.MultiheadAttention`, with the same arguments, and with the same
    parameters under the same names. The same seed gives the same initial parameters, and a
    state_dict fits both classes. This class calls :func:`torch_attn.sdpa`, in training and in
    evaluation, also inside of :class:`torch.nn.TransformerEncoderLayer`. Unless weights are
    requested, this class makes no tensor of L x S, except from masks of that size (see
    :meth:`forward`). :func:`torch_attn.convert` converts the modules of an existing model to this
    class, and :func:`torch_attn.unconvert` converts them back.

    Args:
        embed_dim: size of a query and of the output, a multiple of `num_heads`.
        num_heads: H; the heads have ``head_dim = embed_dim / num_heads`` features each.
        dropout: probability in [0, 1] with which a weight is zeroed, in training.
        bias: whether the projections have biases.
        add_bias_kv: appends a learned key and a learned value, which every query sees.
        add_zero_attn: appends a key and a value of zeros, which every query sees.
        kdim: size of a key; None is `embed_dim`.
        vdim: size of a value; None is `embed_dim`.
        batch_first: True for tensors ``[B, L, embed_dim]``, False for ``[L, B, embed_dim]``.
        num_kv_heads: Hk, the number of heads of key and value, a divisor of `num_heads`; None is
            `num_heads`. ``H / Hk`` neighbouring query heads share a key head and a value head. This
            is grouped-query attention and, if Hk = 1, multi-query attention.
        window_size: (left, right), how many keys a query sees to the left and right of its own
            position; -1 is all. A window cannot be combined with `add_bias_kv` or `add_zero_attn`,
            because the keys that these arguments append have no position.
        softcap: c > 0 replaces a score by ``c tanh(score / c)``, before a mask is added; 0 is off.
        device: the device of the parameters.
        dtype: the dtype of the parameters: float64, float32, bfloat16 or float16.

    Parameters, the same as torch's if ``Hk = H``:

    - in_proj_weight ``[(H + 2 Hk) head_dim, embed_dim]``: the rows for query, key and value, in
      this order. If `kdim` or `vdim` is not `embed_dim`, there are q_proj_weight
      ``[embed_dim, embed_dim]``, k_proj_weight ``[Hk head_dim, kdim]`` and v_proj_weight
      ``[Hk head_dim, vdim]`` instead;
    - in_proj_bias ``[(H + 2 Hk) head_dim]``; bias_k and bias_v ``[1, 1, Hk head_dim]``;
    - out_proj, a linear module. The forward method calls this module, so another module may replace
      it.

    Raises:
        ValueError: a size or a number of heads is not positive, `num_heads` does not divide
            `embed_dim`, `num_kv_heads` does not divide `num_heads`, or `dropout`, `window_size` or
            `softcap` is not valid.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2.2,
    https://arxiv.org/abs/1706.03762; `num_kv_heads`: Ainslie et al., *GQA*, 2023,
    https://arxiv.org/abs/2305.13245.

    Example:
        >>> attention = torch_attn.nn.MultiheadAttention(64, 8, batch_first=True, num_kv_heads=2)
        >>> x = torch.randn(2, 100, 64)
        >>> output, _ = attention(x, x, x, need_weights=False, is_causal=True)
        >>> output.shape, attention.in_proj_weight.shape
        (torch.Size([2, 100, 64]), torch.Size([96, 64]))
    """

    # Defaults for modules that convert() has converted, or that an earlier release has saved.
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> None:
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for name, size in {**sizes, "num_kv_heads": num_kv_heads}.items():
            if size is not None and size <= 0:
                raise ValueError(f"MultiheadAttention: {name} is {size}; it must be positive")
        _check_divides("embed_dim", embed_dim, "num_heads", num_heads)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_divides("num_heads", num_heads, "num_kv_heads", kv_heads)
        if not 0 <= dropout <= 1:
            raise ValueError(
                f"MultiheadAttention: dropout is {dropout}; it must be a probability from 0 to 1"
            )
        if len(window_size) != 2 or min(window_size) < -1:
            raise ValueError(
                f"MultiheadAttention: window_size is {window_size}; it must be (left, right), each "
                "-1 (no bound) or more"
            )
        if max(window_size) >= 0 and (add_bias_kv or add_zero_attn):
            raise ValueError(
                f"MultiheadAttention: window_size is {window_size}, but add_bias_kv and "
                "add_zero_attn append keys at no position; give one of them"
            )
        if not 0 <= softcap < math.inf:
            raise ValueError(
                f"MultiheadAttention: softcap is {softcap}; it must be a finite number, 0 for none "
                "or above"
            )
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            **factory,
        )
        self._set_up(kv_heads)
        self.window_size, self.softcap = (window_size[0], window_size[1]), softcap
        if kv_heads == num_heads:
            return
        rows = kv_heads * self.head_dim
        if self._qkv_same_embed_dim:
            packed = torch.empty(embed_dim + 2 * rows, embed_dim, **factory)
            self.in_proj_weight = Parameter(packed)
        else:
            self.k_proj_weight = Parameter(torch.empty(rows, self.kdim, **factory))
            self.v_proj_weight = Parameter(torch.empty(rows, self.vdim, **factory))
        if bias:
            self.in_proj_bias = Parameter(torch.empty(embed_dim + 2 * rows, **factory))
        if add_bias_kv:
            self.bias_k = Parameter(torch.empty(1, 1, rows, **factory))
            self.bias_v = Parameter(torch.empty(1, 1, rows, **factory))
        self._reset_parameters()

    def _set_up(self, num_kv_heads: int) -> None:
        """Adds the attribute and the hook that torch's module lacks; convert() calls this, too."""
        self.num_kv_heads = num_kv_heads
        self.register_forward_pre_hook(_forward_must_be_called)

    def _own(self) -> dict[str, tuple[Any, Any]]:
        """Maps each argument that torch's module lacks to its value and its default."""
        parameters = inspect.signature(MultiheadAttention).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        defaults["num_kv_heads"] = self.num_heads
        return {name: (getattr(self, name), default) for name, default in defaults.items()}

    def _take_down(self) -> None:
        """Removes the attributes and the hook that torch's module lacks; unconvert() calls this."""
        for name in self._own():
            vars(self).pop(name, None)
        for key, hook in list(self._forward_pre_hooks.items()):
            if hook is _forward_must_be_called:
                del self._forward_pre_hooks[key]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_offset: Tensor | int | None = None,
        key_lengths: Tensor | int | None = None,
        _packed: PackedSequences | None = None,  # of integrations.transformers.unpad
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from every query to the keys that masks do not hide.

        In boolean masks True hides a key, as in torch's module. (In masks of
        :func:`torch_attn.sdpa` True shows a key.) Floating masks are added to the scores and may
        require a gradient. One mask may be boolean and the other mask floating.

        Args:
            query: ``[B, L, embed_dim]``, ``[L, B, embed_dim]`` without `batch_first`, or
                ``[L, embed_dim]``.
            key: ``[B, S, kdim]``, in the query's layout.
            value: ``[B, S, vdim]``, in the query's layout.
            key_padding_mask: ``[B, S]``, or ``[S]`` if the query has no batch.
            need_weights: whether to return the weights, which takes memory O(L S). Pass False if
                you do not use the weights. The default is True only because torch's default is.
            attn_mask: ``[L, S]``, or ``[B H, L, S]`` with the heads of a batch entry side by side.
            average_attn_weights: whether to return the mean of the weights over the heads.
            is_causal: query i attends to keys 0 ... i. With `attn_mask`, `is_causal` is a hint that
                the mask is the causal mask, shifted by `query_offset`. If `need_weights` is False,
                the module relies on this hint and does not read the mask. If `need_weights` is
                True, the module uses the mask and ignores the hint. Torch's module does the same.
            query_offset: the position of query 0 among the keys, for windows and causality: one
                number, or ``[B]`` integers; None is 0.
            key_lengths: how many of the S keys are used: one number, or ``[B]`` integers; None is
                S. The other keys are hidden and not read. `query_offset` and `key_lengths` cannot
                be combined with `add_bias_kv` or `add_zero_attn`.

        Returns:
            The output, of the query's shape, and the weights or None. These are the weights after
            dropout, ``[B, L, S]``, or ``[B, H, L, S]`` if they are not averaged. If the query has
            no batch, the weights lack the dimension B. S includes the keys of `add_bias_kv` and
            `add_zero_attn`, which come last. If a query may attend to no key, its output is the
            bias of out_proj, and its weights are 0.

        Strided nested tensors are accepted for self-attention (one tensor as query, key and value)
        with `batch_first`, and without masks, `query_offset` and `key_lengths`. The output is then
        nested, and the weights are padded with 0.

        Memory: O(L + S) per head, plus the weights if they are requested. A boolean `attn_mask` is
        negated into a copy of the same size. If `attn_mask` and `key_padding_mask` are both read,
        they are merged into one mask, ``[B, 1 or H, L, S]``.

        Raises:
            RuntimeError: shapes or dtypes do not fit. The message names the argument, its value and
                what is allowed.
        """
        count("MultiheadAttention")
        if query.is_nested or key.is_nested or value.is_nested:
            is_self = query is key is value and query.layout == torch.strided
            others = (key_padding_mask, attn_mask, query_offset, key_lengths)
            if not (is_self and self.batch_first and all(other is None for other in others)):
                raise RuntimeError(
                    "MultiheadAttention: an input is a nested tensor; then query, key and value "
                    "must be the same tensor, its layout torch.strided, batch_first True, and "
                    "key_padding_mask, attn_mask, query_offset and key_lengths None"
                )
            return self._forward_nested(query, need_weights, average_attn_weights, is_causal)
        self._check(query, key, value, key_padding_mask, attn_mask)
        if is_causal and attn_mask is not None:
            attn_mask, is_causal = (attn_mask, False) if need_weights else (None, True)
        length_dim = self._length_dim(query)
        q, k, v = (  # [B, H or Hk, L or S, head_dim]
            torch.unflatten(t, -1, (-1, self.head_dim)).movedim(length_dim, -2)
            for t in self._project(query, key, value)
        )
        if _packed is not None:
            output = _packed.attend(
                *(q, k, v),
                window_size=self.window_size,
                dropout_p=self.dropout if self.training else 0.0,
                softcap=self.softcap,
                enable_gqa=self.num_kv_heads != self.num_heads,
            )
            return self.out_proj(output.transpose(0, 1 - length_dim).flatten(-2)), None
        if attn_mask is not None and attn_mask.dim() == query.dim() == 3:
            attn_mask = torch.unflatten(attn_mask, 0, (-1, self.num_heads))
        hidden = _merge(attn_mask, key_padding_mask)

        # Here the keys of add_bias_kv and add_zero_attn come before all other keys, unlike in the
        # returned weights. No mask hides them: masks get columns of 0 for them on the left.
        more = (self.bias_k is not None) + self.add_zero_attn
        if more:
            if query_offset is not None or key_lengths is not None:
                name = "key_lengths" if query_offset is None else "query_offset"
                raise RuntimeError(
                    f"MultiheadAttention: {name} is given, but add_bias_kv and add_zero_attn "
                    "append keys at no position; give a mask"
                )
            k, v = self._with_more_keys(k, self.bias_k), self._with_more_keys(v, self.bias_v)
            hidden = None if hidden is None else F.pad(hidden, (more, 0))
            query_offset = more if is_causal else None
        options = {
            "enable_gqa": self.num_kv_heads != self.num_heads,
            "softcap": self.softcap,
            "window_size": self.window_size,
            "query_offset": _integers("query_offset", query_offset, query),
            "key_lengths": _integers("key_lengths", key_lengths, query),
        }
        output, weights = self._attend(
            q, k, v, hidden, need_weights, average_attn_weights, is_causal, options
        )
        if weights is not None and more:
            weights = weights.roll(-more, -1)
        # flatten() makes no copy, because the output has the query's memory layout.
        return self.out_proj(output.movedim(-2, length_dim).flatten(-2)), weights

    def _length_dim(self, query: Tensor) -> int:
        return 1 if self.batch_first and query.dim() == 3 else 0

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Computes queries, keys and values of all heads in as few products as possible."""
        rows = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, rows, rows]
        packed, bias = self.in_proj_weight, self.in_proj_bias
        if packed is not None and query is key and key is value:
            return list(torch.split(F.linear(query, packed, bias), sizes, -1))
        biases = [None] * 3 if bias is None else torch.split(bias, sizes)
        if packed is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif key is value:
            q_weight, kv_weight = torch.split(packed, [self.embed_dim, 2 * rows])
            kv_bias = None if bias is None else bias[self.embed_dim :]
            kv = torch.split(F.linear(key, kv_weight, kv_bias), rows, -1)
            return [F.linear(query, q_weight, biases[0]), *kv]
        else:
            weights = list(torch.split(packed, sizes))
        return [
            F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
        ]

    def _with_more_keys(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Prepends the keys (or values) of add_bias_kv and add_zero_attn to `x`."""
        shape = (*x.shape[:-2], 1, self.head_dim)
        more = [] if bias is None else [bias.view(-1, 1, self.head_dim).expand(shape)]
        more += [x.new_zeros(shape)] if self.add_zero_attn else []
        return torch.cat([*more, x], -2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        need_weights: bool,
        average_attn_weights: bool,
        is_causal: bool,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        mask = ~hidden if hidden is not None and hidden.dtype == torch.bool else hidden
        dropout_p = self.dropout if self.training else 0.0
        if not need_weights:
            return sdpa(q, k, v, mask, dropout_p, is_causal, **options), None
        written_down = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if not dropout_p and not written_down:
            output, weights = torch.ops.attn._sdpa_and_weights(
                q, k, v, mask, 0.0, is_causal, **options, mean=average_attn_weights
            )
            return output, weights
        # Compiled and traced code calls public operators. These operators return weights before
        # dropout, but torch's module returns weights after dropout. So with dropout this function
        # multiplies the weights by the values itself, and passes values with 0 columns to the
        # operator.
        values = v[..., :0] if dropout_p else v
        output, weights, _ = sdpa_with_weights(q, k, values, mask, 0.0, is_causal, **options)
        if dropout_p:
            weights = F.dropout(weights, dropout_p)
            if (used := options.get("key_lengths")) is not None:  # what is beyond may be NaN
                places = torch.arange(v.shape[-2], device=v.device)[:, None]
                v = v.masked_fill(places >= torch.as_tensor(used)[..., None, None, None], 0)
            output = weights @ v.repeat_interleave(self.num_heads // self.num_kv_heads, -3)
        return output, weights.mean(-3) if average_attn_weights else weights

    def _forward_nested(
        self, x: Tensor, need_weights: bool, average_attn_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Pads sequences of different lengths, computes self-attention and removes the padding."""
        lengths = [text.size(0) for text in x.unbind()]
        padded = x.to_padded_tensor(0.0)
        of_texts = torch.tensor(lengths, device=x.device)
        padding = torch.arange(padded.size(1), device=x.device) >= of_texts[:, None]
        output, weights = self.forward(
            padded, padded, padded, padding, need_weights, None, average_attn_weights, is_causal
        )
        texts = [row[:length] for row, length in zip(output, lengths, strict=True)]
        if weights is not None:
            rows = padding[..., None] if average_attn_weights else padding[:, None, :, None]
            weights = weights.masked_fill(rows, 0)
        return torch.nested.as_nested_tensor(texts), weights

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        def shape(*batch_and_length: int | str, features: int) -> tuple[int | str, ...]:
            return (*(batch_and_length[:: 1 if self.batch_first else -1]), features)

        _check_shape(
            "query", query, ("L", self.embed_dim), shape("B", "L", features=self.embed_dim)
        )
        length_dim = self._length_dim(query)
        batch = [query.size(1 - length_dim)] if query.dim() == 3 else []
        key_shape = shape(*batch, "S", features=self.kdim)
        _check_shape("key", key, key_shape, hint=self._layout_hint(query, key.shape[:1]))
        L, S = query.size(length_dim), key.size(length_dim)
        _check_shape("value", value, shape(*batch, S, features=self.vdim))
        packed, device = self.in_proj_weight, query.device.type
        dtype = (self.q_proj_weight if packed is None else packed).dtype
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        for name, tensor in {"query": query, "key": key, "value": value}.items():
            if tensor.dtype != dtype and not autocast:
                raise RuntimeError(
                    f"MultiheadAttention: {name} has dtype {tensor.dtype}; it must be that of the "
                    f"parameters, {dtype}"
                )
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise RuntimeError(
                    f"MultiheadAttention: {name} has dtype {mask.dtype}; it must be bool (True "
                    "hides a key) or floating (added to the scores)"
                )
        if key_padding_mask is not None:
            hint = self._layout_hint(query, key_padding_mask.shape)
            _check_shape("key_padding_mask", key_padding_mask, (*batch, S), hint=hint)
        if attn_mask is not None:
            _check_shape("attn_mask", attn_mask, (L, S), (math.prod(batch) * self.num_heads, L, S))

    def _layout_hint(self, query: Tensor, batch_comes_first: torch.Size) -> str:
        """Suggests batch_first=True if the shapes would fit with it."""
        if self.batch_first or query.dim() != 3 or batch_comes_first[:1] != query.shape[:1]:
            return ""
        return "; for inputs [B, L, embed_dim] the module is made with batch_first=True"

    def extra_repr(self) -> str:
        """Names the sizes, and the further arguments that differ from their defaults."""
        arguments: dict[str, tuple[Any, Any]] = {
            "embed_dim": (self.embed_dim, None),
            "num_heads": (self.num_heads, None),
            "kdim": (self.kdim, self.embed_dim),
            "vdim": (self.vdim, self.embed_dim),
            "dropout": (self.dropout, 0.0),
            "bias": (self.in_proj_bias is not None, True),
            "add_bias_kv": (self.bias_k is not None, False),
            "add_zero_attn": (self.add_zero_attn, False),
            "batch_first": (self.batch_first, False),
            **self._own(),
        }
        return ", ".join(f"{name}={x}" for name, (x, default) in arguments.items() if x != default)


def _forward_must_be_called(module: nn.Module, args: Any) -> None:
    """Does nothing. Its presence makes :class:`torch.nn.TransformerEncoderLayer` call the module.

    If no module of the layer has a hook, the layer may take its fast path in evaluation. The fast
    path does not call the attention module, but computes PyTorch's own attention with the module's
    parameters.
    """


def _merge(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Merges both masks into one that broadcasts to [B, H, L, S]; True or -inf hides a key."""
    if key_padding_mask is None:
        return attn_mask
    key_padding_mask = key_padding_mask[..., None, None, :]
    if attn_mask is None:
        return key_padding_mask
    if attn_mask.dtype == key_padding_mask.dtype == torch.bool:
        return attn_mask | key_padding_mask
    if attn_mask.dtype == torch.bool:
        return key_padding_mask.masked_fill(attn_mask, -math.inf)
    if key_padding_mask.dtype == torch.bool:
        return attn_mask.masked_fill(key_padding_mask, -math.inf)
    return attn_mask + key_padding_mask


def _check_divides(name: str, number: int, divisor_name: str, divisor: int) -> None:
    if number % divisor:
        raise ValueError(
            f"MultiheadAttention: {divisor_name} is {divisor}; it must divide {name}, {number}"
        )


def _check_shape(
    name: str, tensor: Tensor, *allowed: tuple[int | str, ...], hint: str = ""
) -> None:
    """Refuses a shape that is not allowed; a letter in `allowed` stands for any size."""
    for shape in allowed:
        if tensor.dim() == len(shape) and all(
            isinstance(wanted, str) or size == wanted
            for size, wanted in zip(tensor.shape, shape, strict=True)
        ):
            return
    shapes = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in allowed)
    raise RuntimeError(
        f"MultiheadAttention: {name} has shape {list(tensor.shape)}; it must have shape {shapes}"
        f"{hint}"
    )
