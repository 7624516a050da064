"""Makes the attention modules of an existing model those of this package, and torch's again."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from torch import nn

from torch_attn.nn import MultiheadAttention

__all__ = ["Converted", "convert", "unconvert"]


class Converted(NamedTuple):
    """What :func:`convert` or :func:`unconvert` did, by the names of ``model.named_modules()``.

    The name of the model itself is "".

    Attributes:
        swapped: the modules that are now of the other class.
        skipped: the modules that were left as they are, each with the reason.
    """

    swapped: tuple[str, ...]
    skipped: dict[str, str]


def convert(model: nn.Module) -> Converted:
    """Makes every :class:`torch.nn.MultiheadAttention` in a model compute with this package.

    The modules stay the same objects and become of the class
    :class:`torch_attn.nn.MultiheadAttention`. So parameters, names, hooks, the training flag and
    whatever else refers to them stay as they are, an optimizer too, and the model itself may be
    such a module. One that appears in several places is listed once. What was converted before is
    not listed again.

    Convert before you compile, parametrize or shard a model, and before its state is saved whole
    (``torch.save(model)``): such a file needs torch_attn to be loaded. A state_dict does not.
    :func:`unconvert` is the way back, such as for TorchScript.

    Args:
        model: changed in place.

    Returns:
        Which modules were swapped, and which were skipped and why: those of classes derived from
        :class:`torch.nn.MultiheadAttention`, of which only their authors know what they do, and
        those whose ``forward`` was replaced. A model in which there is none gives a warning.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 8)
        >>> torch_attn.convert(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        Converted(swapped=('layers.0.self_attn', 'layers.1.self_attn'), skipped={})
    """
    hint = (
        "; for models that call F.scaled_dot_product_attention there is "
        "torch_attn.replacing_sdpa(), for those of transformers and diffusers "
        "torch_attn.integrations"
    )
    swapped, skipped = [], {}
    for name, module in _attentions("convert", model, hint):
        if isinstance(module, MultiheadAttention):
            continue
        if reason := _changed(module, nn.MultiheadAttention):
            skipped[name] = reason
        else:
            # As torch.nn.utils.parametrize does: who holds this object would not know another.
            module.__class__ = MultiheadAttention
            assert isinstance(module, MultiheadAttention)
            module._set_up(module.num_heads)
            swapped.append(name)
    return Converted(tuple(swapped), skipped)


def unconvert(model: nn.Module) -> Converted:
    """Makes every :class:`torch_attn.nn.MultiheadAttention` in a model torch's module again.

    The way back from :func:`convert`: the modules stay the same objects, with the parameters that
    they have by now, and nothing of this package stays in them. So the model can be scripted, and
    exported and saved whole for where there is no torch_attn. Modules that were never torch's come
    along, if torch's can do what they do. One that appears in several places is listed once.

    Args:
        model: changed in place.

    Returns:
        Which modules were swapped, and which were skipped and why: those with an option that
        torch's has not (fewer heads for keys and values, a window, a soft cap), those whose
        ``out_proj`` does more than a linear module (torch's reads its weight and does not call
        it), those of derived classes, and those whose ``forward`` was replaced. A model without
        attention modules, be they torch's or those of this package, gives a warning.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 8)
        >>> torch_attn.convert(model)
        Converted(swapped=('self_attn',), skipped={})
        >>> torch_attn.unconvert(model)
        Converted(swapped=('self_attn',), skipped={})
        >>> type(model.self_attn)
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    swapped, skipped = [], {}
    for name, module in _attentions("unconvert", model):
        if not isinstance(module, MultiheadAttention):
            continue
        if reason := _changed(module, MultiheadAttention) or _beyond_torch(module):
            skipped[name] = reason
        else:
            module._take_down()
            module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            swapped.append(name)
    return Converted(tuple(swapped), skipped)


def _attentions(
    caller: str, model: nn.Module, hint: str = ""
) -> list[tuple[str, nn.MultiheadAttention]]:
    """The modules of torch and of this package, and what both functions say to the user."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: model is a {type(model).__name__}; it must be a torch.nn.Module"
        )
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if not modules:
        warnings.warn(
            f"{caller}: {type(model).__name__} has no torch.nn.MultiheadAttention{hint}",
            stacklevel=3,
        )
    return modules


def _changed(module: nn.MultiheadAttention, cls: type) -> str:
    """Why a module may do something else than its class does."""
    if type(module) is not cls:
        return f"its class, {type(module).__qualname__}, is derived"
    return "its forward was replaced" if "forward" in vars(module) else ""


def _beyond_torch(module: MultiheadAttention) -> str:
    """What torch's module cannot express."""
    own = module._own().items()
    if more := [f"{name}={value}" for name, (value, default) in own if value != default]:
        return f"torch's module has no {', '.join(more)}"
    out_proj = module.out_proj
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if (
        type(out_proj).forward is not nn.Linear.forward
        or "forward" in vars(out_proj)
        or any(getattr(out_proj, name) for name in hooks)
    ):
        return f"torch's module does not call its out_proj, a {type(out_proj).__qualname__}"
    return ""
