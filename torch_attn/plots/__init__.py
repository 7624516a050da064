"""Pictures of attention, drawn with matplotlib: the extra ``lesson``.

One of a matrix of weights, as a file::

    from torch_attn import plots
    plots.heatmap(weights, tokens).savefig("weights.png")

All functions take tensors of any dtype and device, or what :func:`torch.as_tensor` takes, and
return a :class:`matplotlib.figure.Figure`. They draw on the axes given as `ax`, or else make a
figure that is at most 4.8 inches wide, for a page that is also read on a phone. They neither show
anything nor change a setting of matplotlib. Colours of text, axes and background are those of
``matplotlib.rcParams`` at the time of the call, so that ``matplotlib.rc_context`` makes a theme;
all others, such as those of ``PALETTE``, can be told apart with every kind of colour vision. Sizes
of text follow ``font.size``.

Texts are written as they are; nothing is taken for a formula. The font that matplotlib starts with
has no Chinese letters and no emoji, and draws boxes in their place. Name installed fonts that have
them after it::

    matplotlib.rcParams["font.family"] = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Emoji"]

Wrong shapes, counts of tokens and options raise ValueError, arguments of a wrong type TypeError;
both name the argument and what is allowed.
"""

from torch_attn._import import import_of

with import_of("matplotlib", extra="lesson"):
    import matplotlib as _matplotlib  # noqa: F401

from torch_attn.plots._curves import activations, scaling
from torch_attn.plots._graph import graph
from torch_attn.plots._matrices import heads, heatmap
from torch_attn.plots._points import embeddings, tsne
from torch_attn.plots._style import PALETTE

__all__ = ["PALETTE", "activations", "embeddings", "graph", "heads", "heatmap", "scaling", "tsne"]
