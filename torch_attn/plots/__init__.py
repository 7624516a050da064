"""Pictures of attention, drawn with matplotlib. The extra ``lesson`` installs it.

This example writes a picture of a matrix of weights to a file::

    from torch_attn import plots
    plots.heatmap(weights, tokens).savefig("weights.png")

All functions take tensors of any dtype and device, or what :func:`torch.as_tensor` takes, and
return a :class:`matplotlib.figure.Figure`. They draw on the axes given as `ax`. Without `ax` they
make a figure at most 4.8 inches wide, which also fits a phone. They neither show the figure nor
change matplotlib's settings. Text, axes and background have the colours of ``matplotlib.rcParams``
at the time of the call, so ``matplotlib.rc_context`` sets a theme. All other colours, such as the
``PALETTE``, can be told apart with every kind of colour vision. Text sizes follow ``font.size``.

Text is drawn literally, never as a formula. Matplotlib's default font lacks Chinese characters and
emoji, and draws boxes in their place. To draw them, name installed fonts that have these characters
after the default font::

    matplotlib.rcParams["font.family"] = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Emoji"]

Wrong shapes, token counts and options raise ValueError. Arguments of a wrong type raise TypeError.
Both errors name the argument and what is allowed.
"""

from torch_attn._import import import_of

with import_of("matplotlib", extra="lesson"):
    import matplotlib as _matplotlib  # noqa: F401

from torch_attn.plots._matrices import heads, heatmap
from torch_attn.plots._points import tsne
from torch_attn.plots._style import PALETTE

__all__ = ["PALETTE", "heads", "heatmap", "tsne"]
