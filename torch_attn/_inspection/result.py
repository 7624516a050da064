"""The result of :func:`torch_attn.inspect`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_attn.functional import Stats

__all__ = ["Inspection", "Layer"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of attention, with all of its heads. Its tensors have no gradients.

    Attributes:
        name: the name of the calling module, as in ``model.named_modules()``; "" is the model.
        call: how often that module had called attention before this call; 0 unless layers share a
            module.
        is_cross: whether keys and queries come from different sequences, as far as the module's
            arguments show it. A :class:`torch.nn.MultiheadAttention` shows it by a query and a key
            of different shapes or values. A module of any other class shows it by an argument
            `key_value_states` or `encoder_hidden_states`. False if no argument shows it.
        weights: ``[B, H, L, S]``, after softmax and before dropout; None if not requested.
        query: ``[B, H, L, E]``, as used for the scores.
        key: ``[B, Hk, S, E]``; Hk divides H.
        scale: the factor of the scores.
        largest_score: ``[B, H, L]``, the largest score of each query, scaled and masked; -inf if
            the query sees no key.
        entropy: ``[B, H, L]``, the entropy of each query's weights, in nats: 0 where one key has
            all the weight.
        logsumexp: ``[B, H, L]``, the logsumexp of each query's scores; -inf if the query sees no
            key.
        received_weight: ``[B, H, S]``, the sum of the weights that all queries give to a key.
        visible_keys: ``[B, H, L]``, the number of keys that each query sees through masks, windows
            and lengths. A floating mask counts as hiding a key if it is -9984 (-1e4 in bfloat16) or
            less. If such finite numbers hide every key of a query, the count is 0, although the
            softmax gives weight to some of these keys.
        saturated_above: the threshold of :attr:`saturation`.
    """

    name: str
    call: int
    is_cross: bool
    weights: Tensor | None
    query: Tensor
    key: Tensor
    scale: float
    largest_score: Tensor
    entropy: Tensor
    logsumexp: Tensor
    received_weight: Tensor
    visible_keys: Tensor
    saturated_above: float

    @property
    def largest_weight(self) -> Tensor:
        """``[B, H, L]``, the largest weight of each query.

        It is 1 if one key has all the weight, and 0 if the query sees no key.
        """
        stats = Stats(self.largest_score, self.entropy, self.logsumexp, self.received_weight)
        return stats.largest_weight

    @property
    def saturation(self) -> Tensor:
        """``[B, H]``, the share of queries whose largest weight exceeds `saturated_above`.

        Only queries that see two or more keys count, because a single key always has the weight 1.
        Without such a query the share is 0.
        """
        chooses = self.visible_keys > 1
        saturated = (self.largest_weight > self.saturated_above) & chooses
        return saturated.sum(-1) / chooses.sum(-1).clamp(min=1)

    def __repr__(self) -> str:
        B, H, L, _ = self.query.shape
        again = f", call={self.call}" if self.call else ""
        return f"Layer({self.name!r}{again}, B={B}, H={H}, L={L}, S={self.key.size(-2)})"


@dataclass(frozen=True, eq=False)
class Inspection:
    """The attention of one call of a model; see :func:`torch_attn.inspect`.

    An inspection ``x`` behaves like the tuple of its layers: ``len(x)``, ``for layer in x`` and
    ``x[0]``. ``x["encoder.layers.0.self_attn"]`` is the first call by the module of that name.

    Attributes:
        output: what the model returned.
        layers: every call of attention, in the order of the calls.
        skipped: modules with calls whose statistics cannot be computed, each with the reason.
    """

    output: Any
    layers: tuple[Layer, ...]
    skipped: dict[str, str]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, layer: int | str) -> Layer:
        if isinstance(layer, int):
            return self.layers[layer]
        for found in self.layers:
            if found.name == layer:
                return found
        names = ", ".join(sorted({found.name for found in self.layers}))
        raise KeyError(f"no layer is called {layer!r}; there are {names or 'none'}")

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """The weights ``[B, H, L, S]`` of every layer, as bertviz takes them.

        Raises:
            ValueError: the weights were not requested; or the model has cross-attention, so that
                weights over different sequences would be mixed. For such a model take
                :attr:`encoder_attentions`, :attr:`decoder_attentions` and :attr:`cross_attentions`.
        """
        if any(layer.is_cross for layer in self.layers):
            raise ValueError(
                "inspect: the model has cross-attention, whose keys are other tokens than its "
                "queries; take encoder_attentions, decoder_attentions and cross_attentions"
            )
        return _weights(self.layers)

    @property
    def encoder_attentions(self) -> tuple[Tensor, ...]:
        """The weights of self-attention inside modules called "encoder", as :attr:`attentions`."""
        return _weights(layer for layer in self.layers if _is_of(layer, "encoder"))

    @property
    def decoder_attentions(self) -> tuple[Tensor, ...]:
        """The weights of self-attention inside modules called "decoder", as :attr:`attentions`."""
        return _weights(layer for layer in self.layers if _is_of(layer, "decoder"))

    @property
    def cross_attentions(self) -> tuple[Tensor, ...]:
        """The weights of cross-attention alone, as :attr:`attentions`."""
        return _weights(layer for layer in self.layers if layer.is_cross)

    def table(self) -> str:
        """Returns a table with a line for each head: means and extremes over batch and queries.

        The column "entropy" gives the mean entropy in nats and, in brackets, its share of the
        largest possible entropy. A note at the end of a line points to what may be wrong:

        - NaN or infinity: a score is not finite, so gradients will not be finite;
        - saturated: for more than half of the queries that see two or more keys, the largest weight
          exceeds `saturated_above`, so that little gradient passes through the softmax;
        - uniform: the mean entropy is within 1 % of the largest possible entropy, so the head
          averages all keys;
        - sink: in most sequences of 8 or more keys, one key receives more than half of all weight.
          Many trained models have such heads. The key is often the first or a separating token.

        Queries of padding count as well, because masks hide keys, not queries.

        Sources: saturation: Zhai et al., *Stabilizing Transformer Training by Preventing Attention
        Entropy Collapse*, 2023, https://arxiv.org/abs/2303.06296; sinks: Xiao et al., *Efficient
        Streaming Language Models with Attention Sinks*, 2023, https://arxiv.org/abs/2309.17453.
        """
        head = "layer", "head", "entropy", "largest score", "largest weight", "saturated", ""
        rows: list[tuple[str, ...]] = [head]
        for layer in self.layers:
            name = layer.name or "(the model)"
            name += f" (call {layer.call + 1})" if layer.call else ""
            rows += [(name, *row) for row in _rows(layer)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 6) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines += [f"not inspected: {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Inspection: {len(self.layers)} layers, {len(self.skipped)} skipped>"


def _weights(layers: Any) -> tuple[Tensor, ...]:
    found = tuple(layer.weights for layer in layers)
    if any(weights is None for weights in found):
        raise ValueError("inspect: weights were not asked for; pass weights=True")
    return found


def _is_of(layer: Layer, part: str) -> bool:
    return not layer.is_cross and part in layer.name.split(".")


def _rows(layer: Layer) -> Iterator[tuple[str, ...]]:
    """Yields the cells of :meth:`Inspection.table` for each head."""
    sees = layer.visible_keys > 0
    chooses = layer.visible_keys > 1
    # A query that sees one key has the entropy 0 = log 1. For such a query clamp() avoids 0 / 0.
    parts = layer.entropy / layer.visible_keys.clamp(min=2).log()
    received = layer.received_weight.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    shares = layer.received_weight / received[..., None]
    # With S = 0, max() would raise. No query sees a key then, so the loop below does not read
    # `share` and `keys`.
    share, keys = shares.max(-1) if shares.size(-1) else (received, received)
    for head in range(layer.query.size(1)):
        at = sees[:, head]
        if not at.any():
            yield (str(head), "", "", "", "", "sees no key")
            continue
        entropy = layer.entropy[:, head][at].mean().item()
        score = layer.largest_score[:, head][at].max().item()
        weight = layer.largest_weight[:, head][at].mean().item()
        choosing = chooses[:, head]
        saturated = _mean(layer.largest_weight[:, head] > layer.saturated_above, choosing)
        part = _mean(parts[:, head], choosing)
        notes = []
        if not layer.logsumexp[:, head][at].isfinite().all():
            notes.append("NaN or infinity")
        if saturated > 0.5:
            notes.append("saturated")
        if part > 0.99:
            notes.append("uniform")
        long = layer.visible_keys[:, head].amax(-1) >= 8
        sinks = long & (share[:, head] > 0.5)
        if _mean(sinks, long) > 0.5:
            places = sorted(set(keys[:, head][sinks].tolist()))
            names = ", ".join(map(str, places[:3])) + (", ..." if len(places) > 3 else "")
            notes.append(f"sink: {100 * _mean(share[:, head], sinks):.0f} % to key {names}")
        yield (
            str(head),
            f"{entropy:.2f} ({100 * part:3.0f} %)",
            f"{score:.2f}",
            f"{weight:.3f}",
            f"{100 * saturated:.0f} %",
            "; ".join(notes),
        )


def _mean(values: Tensor, where: Tensor) -> float:
    """Returns the mean of the values at `where`, or 0 if there are no such values."""
    return values[where].double().mean().item() if bool(where.any()) else 0.0
