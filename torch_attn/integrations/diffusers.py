"""`attn` as an attention backend of Hugging Face diffusers.

:func:`register` returns a name. Pass the name to a model's `set_attention_backend`
(https://huggingface.co/docs/diffusers/optimization/attention_backends)::

    from torch_attn.integrations import diffusers
    pipeline.transformer.set_attention_backend(diffusers.register())

Not every model asks for a backend. :func:`register` says which models do, and
:func:`torch_attn.calls` counts the calls of these models.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from torch import Tensor

import torch_attn
from torch_attn._count import counter
from torch_attn._import import import_of, install
from torch_attn.flex import attend, is_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["attention_forward", "register", "unregister"]

# The names under which register() replaced a backend of diffusers. Each name maps to the entries
# that the replaced backend had in the tables of diffusers' registry.
_taken: dict[str, dict[str, Any]] = {}
_TABLES = ("_backends", "_constraints", "_supported_arg_names")


def register(name: str = "attn") -> str:
    """Makes `attn` known to diffusers as an attention backend.

    `model.set_attention_backend` and the context manager `diffusers.attention_backend` then take
    the name. In diffusers 0.42 the models of newer pipelines ask for a backend, among them Flux,
    Qwen-Image, Wan, HunyuanVideo, LTX, Cosmos and Z-Image. Older models call PyTorch's attention
    themselves and accept every name without an effect. Examples are all UNets and ControlNets with
    `Attention` blocks, DiT, PixArt, Stable Diffusion 3, AuraFlow, CogVideoX, Lumina and Sana. The
    number of :func:`torch_attn.calls` does not grow for such a model.

    Diffusers keeps the names of its backends in an `Enum`. An `Enum` has no public way to add a
    name, so this function changes the `Enum` itself. The name exists only after the call. So the
    environment variable `DIFFUSERS_ATTN_BACKEND`, which diffusers reads when it is imported, cannot
    hold the name.

    Args:
        name: the name in lower case, because `set_attention_backend` looks names up in lower case.
            With "native", `attn` replaces the backend that diffusers chooses by itself, until
            :func:`unregister`. With "flex", it replaces FlexAttention, which does not train on a
            CPU.

    Returns:
        `name`.

    Raises:
        ValueError: `name` is not an identifier in lower-case letters.
        ImportError: diffusers is not installed, is older than 0.35 or does not import. In the last
            case the message names the error of the failed import.
    """
    if not (isinstance(name, str) and name.isidentifier() and name == name.lower()):
        raise ValueError(f"name is {name!r}; it must be an identifier in lower case")
    registry, names = _backends()
    member = _member(names, name)
    if registry._backends.get(member) not in (None, attention_forward):
        _taken[name] = {table: getattr(registry, table)[member] for table in _TABLES}
    registry.register(member)(attention_forward)
    return name


def unregister(name: str) -> None:
    """Restores the backend that :func:`register` replaced under a name, such as "native".

    Models attend with diffusers' own backend from their next call on.

    Args:
        name: the name that was passed to :func:`register`.

    Raises:
        ValueError: `attn` does not replace a backend of that name.
    """
    if name not in _taken:
        taken = ", ".join(map(repr, _taken)) or "none"
        raise ValueError(f"name is {name!r}; register() took these from diffusers: {taken}")
    registry, names = _backends()
    for table, entry in _taken.pop(name).items():
        getattr(registry, table)[names(name)] = entry


def _backends() -> tuple[Any, Any]:
    """The registry of diffusers' backends and the `Enum` of their names."""
    with import_of("diffusers"):
        diffusers: Any = importlib.import_module("diffusers")
        module: Any = None
        if importlib.util.find_spec("diffusers.models.attention_dispatch") is not None:
            module = importlib.import_module("diffusers.models.attention_dispatch")
    registry = getattr(module, "_AttentionBackendRegistry", None)
    names = getattr(module, "AttentionBackendName", None)
    if registry is None or names is None:
        raise ImportError(
            f"diffusers {diffusers.__version__} has no attention backends that torch_attn knows; "
            f"it needs diffusers 0.35 or later: {install('diffusers')}",
            name="diffusers",
        )
    return registry, names


def _member(names: Any, value: str) -> Any:
    """Returns the member of an `Enum` of strings that has this value. Adds a missing member."""
    if value not in {member.value for member in names}:
        member = str.__new__(names, value)
        member._name_, member._value_ = value.upper(), value
        names._member_map_[member._name_] = names._value2member_map_[value] = member
        names._member_names_.append(member._name_)
    return names(value)


_count = counter("diffusers")


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The function that diffusers calls. It takes the arguments of diffusers' backend "native".

    Args:
        query: `[B, L, H, E]`.
        key: `[B, S, Hk, E]`.
        value: `[B, S, Hk, Ev]`.
        attn_mask: `[B, S]`, or broadcasts to `[B, H, L, S]`; boolean (True attends) or floating
            (added). It may also be a BlockMask of FlexAttention.
        dropout_p: probability.
        is_causal: query i attends to keys 0 ... i.
        scale: the factor of the scores, 1 / sqrt(E) if None.
        enable_gqa: allows Hk to be a divisor of H.
        return_lse: not supported.
        _parallel_config: diffusers' context parallelism, not supported.

    Returns:
        Output `[B, L, H, Ev]`.

    Raises:
        ValueError: the model asks for `return_lse` or for context parallelism.
        RuntimeError: shapes, dtypes or devices do not fit, as for :func:`torch_attn.sdpa`.
    """
    if return_lse or _parallel_config is not None:
        argument = "return_lse" if return_lse else "context parallelism"
        raise ValueError(
            f"the model asks for {argument}, which attn does not support; "
            'choose another backend, such as "native"'
        )
    _count()
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if is_block_mask(attn_mask):
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal}
        options |= {"scale": scale, "enable_gqa": enable_gqa}
        return attend(query, key, value, None, attn_mask, **options)[0].transpose(1, 2)
    if attn_mask is not None and attn_mask.shape == (query.size(0), key.size(2)):
        attn_mask = attn_mask[:, None, None, :]
    output = torch_attn.sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output.transpose(1, 2)
