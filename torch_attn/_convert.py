"""Converts the attention modules of an existing model to this package, and back."""

from __future__ import annotations

import inspect
import warnings
from typing import NamedTuple

from torch import nn

from torch_attn.nn import MultiheadAttention

__all__ = ["Converted", "convert", "unconvert"]


class Converted(NamedTuple):
    """Names the modules that one :func:`convert` or :func:`unconvert` changed or skipped.

    The names are those of ``model.named_modules()``. The model itself has the name "".

    Attributes:
        swapped: the modules whose class changed.
        skipped: the modules that did not change, each with the reason.
        with_weights: swapped modules that will compute weights, which takes memory O(L S). The
            class that calls such a module does not mention `need_weights`, so the default True
            holds. Pass ``need_weights=False`` in that call.
    """

    swapped: tuple[str, ...]
    skipped: dict[str, str]
    with_weights: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Omits `with_weights` if it is empty."""
        fields = [f"swapped={self.swapped!r}", f"skipped={self.skipped!r}"]
        if self.with_weights:
            fields.append(f"with_weights={self.with_weights!r}")
        return f"Converted({', '.join(fields)})"


def convert(model: nn.Module) -> Converted:
    """Makes every :class:`torch.nn.MultiheadAttention` in a model compute with this package.

    Each module stays the same object, and its class becomes
    :class:`torch_attn.nn.MultiheadAttention`. So parameters, names, hooks and the training flag
    stay, and an optimizer's references to the parameters stay valid. The model itself may be a
    :class:`torch.nn.MultiheadAttention`. A module that appears in several places is listed once.
    Modules that an earlier call converted are not listed again.

    Convert a model before you compile, parametrize or shard it. Loading a whole converted model
    (``torch.save(model)``) needs torch_attn, but loading the state_dict does not. :func:`unconvert`
    converts a model back, for TorchScript for example.

    Args:
        model: changed in place.

    Returns:
        Which modules were swapped, which swapped modules will compute weights, and which modules
        were skipped and why. :func:`convert` skips modules of a class derived from
        :class:`torch.nn.MultiheadAttention`, because such a class may do something else. It also
        skips modules whose ``forward`` was replaced. If a model has no attention module, it warns.

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
            # Changes the class, as torch.nn.utils.parametrize does, so that references to this
            # object stay valid.
            module.__class__ = MultiheadAttention
            assert isinstance(module, MultiheadAttention)
            module._set_up(module.num_heads)
            swapped.append(name)
    with_weights = tuple(name for name in swapped if _leaves_weights_on(model, name))
    return Converted(tuple(swapped), skipped, with_weights)


def _leaves_weights_on(model: nn.Module, name: str) -> bool:
    """Returns whether the class that calls a module leaves `need_weights` at its default."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    while name:
        name = name.rpartition(".")[0]
        caller = model.get_submodule(name)
        if not isinstance(caller, containers):
            break
    else:
        return False  # no module but containers is around it, so its caller is unknown
    classes = [c for c in type(caller).__mro__ if c not in (nn.Module, object)]
    try:
        sources = [inspect.getsource(c) for c in classes]
    except (OSError, TypeError):  # a class typed into a console, for example, has no source
        return False
    return bool(sources) and not any("need_weights" in source for source in sources)


def unconvert(model: nn.Module) -> Converted:
    """Converts every :class:`torch_attn.nn.MultiheadAttention` in a model back to torch's module.

    This undoes :func:`convert`. Each module stays the same object, with its present parameters, and
    nothing of this package stays in it. So the model can be scripted. It can also be exported, or
    saved whole, for a machine without torch_attn. Modules that were made as
    :class:`torch_attn.nn.MultiheadAttention` are swapped too, if torch's module can do the same. A
    module that appears in several places is listed once.

    Args:
        model: changed in place.

    Returns:
        Which modules were swapped, and which were skipped and why. :func:`unconvert` skips modules
        of derived classes, modules whose ``forward`` was replaced, and modules with an option that
        torch's module lacks (fewer heads for keys and values, a window, a soft cap). It also skips
        modules whose ``out_proj`` does more than a linear module, because torch's module only reads
        the weight and bias of ``out_proj`` and does not call it. If a model has no attention
        modules of either class, it warns.

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
    """Finds the attention modules of both classes; warns if the model has none."""
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
    """Returns why a module may not compute what `cls` computes; "" if there is no such reason."""
    if type(module) is not cls:
        return f"its class, {type(module).__qualname__}, is derived"
    return "its forward was replaced" if "forward" in vars(module) else ""


def _beyond_torch(module: MultiheadAttention) -> str:
    """Returns why torch's module cannot replace this module, or ""."""
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
