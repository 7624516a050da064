"""Sphinx: `make docs` makes out/docs of all pages of the checkout and of the docstrings."""

import torch_attn

project = "torch_attn"
version = release = torch_attn.__version__
copyright = "the authors of torch_attn"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/*/README.md",
    "tests/README.md",
    "tests/*/README.md",
]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and dtypes are in the text
napoleon_use_rtype = False  # what stands before a colon is no type
smartquotes_action = "D"  # of dashes only: a quote may belong to a name or a transposed matrix

html_theme = "furo"
html_title = f"torch_attn {version}"
pygments_dark_style = "github-dark"  # the theme's own underlines modules as if they were links
html_static_path = html_css_files = ["site.css"]
