"""Makes the attention modules of an existing model those of this package."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from torch import nn

from torch_attn.nn import MultiheadAttention

__all__ = ["Converted", "convert"]


class Converted(NamedTuple):
    """What :func:`convert` did, by the names of ``model.named_modules()``; "" is the model itself.

    Attributes:
        swapped: the modules that are now :class:`torch_attn.nn.MultiheadAttention`.
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
    (``torch.save(model)``): such a file needs torch_attn to be loaded. A state_dict does not. There
    is no way back: convert a ``copy.deepcopy`` of a model that you also need as it was, such as for
    TorchScript or ONNX.

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model is a {type(model).__name__}; it must be a torch.nn.Module")
    swapped, skipped = [], {}
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if not modules:
        warnings.warn(
            f"convert: {type(model).__name__} has no torch.nn.MultiheadAttention; for models that "
            "call F.scaled_dot_product_attention there is torch_attn.replacing_sdpa(), for those "
            "of transformers and diffusers torch_attn.integrations",
            stacklevel=2,
        )
    for name, module in modules:
        if isinstance(module, MultiheadAttention):
            continue
        if type(module) is not nn.MultiheadAttention:
            skipped[name] = f"its class, {type(module).__qualname__}, is derived"
        elif "forward" in vars(module):
            skipped[name] = "its forward was replaced"
        else:
            _swap(module)
            swapped.append(name)
    return Converted(tuple(swapped), skipped)


def _swap(module: nn.MultiheadAttention) -> None:
    # As torch.nn.utils.parametrize does: another object would be unknown to all who hold this one.
    module.__class__ = MultiheadAttention
    assert isinstance(module, MultiheadAttention)
    module._set_up(module.num_heads)
