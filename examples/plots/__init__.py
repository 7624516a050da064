"""The pictures of the lesson and the demo: those of :mod:`torch_attn.plots`, and four more.

All functions take arguments, draw and raise as those of :mod:`torch_attn.plots` do.
"""

from examples.plots._arrows import embeddings
from examples.plots._curves import activations, scaling
from examples.plots._graph import graph
from torch_attn.plots import PALETTE, heads, heatmap, tsne

__all__ = ["PALETTE", "activations", "embeddings", "graph", "heads", "heatmap", "scaling", "tsne"]
