"""The pictures of the lesson and the demo: four more beside those of :mod:`torch_attn.plots`.

Arguments, results and errors follow the rules of :mod:`torch_attn.plots`.
"""

from examples.plots._arrows import embeddings
from examples.plots._curves import activations, scaling
from examples.plots._graph import graph
from torch_attn.plots import PALETTE, heads, heatmap, tsne

__all__ = ["PALETTE", "activations", "embeddings", "graph", "heads", "heatmap", "scaling", "tsne"]
