"""The page's last section: the five sources that chapters follow, and what each says it is."""

from __future__ import annotations

from .page import Section

# The four that give a reason for the division by √dₖ.
ON_THE_ROOT = (
    "*Scaled Dot-Product Attention*, *Notes On: Scaled Dot-Product Attention*, *Attention – a "
    "visual tour* and *An Intuition for Attention*"
)


def section() -> Section:
    found = Section("sources", "Sources")
    found.text("""
        A chapter that begins with "After" follows one or more of these. It computes their examples
        again and measures what they claim; a folded note says where they differ from it.

        - *Scaled Dot-Product Attention*: a page of notes on the formula, its terms and the reason
          for the scaling, with an example of four tokens in NumPy.
        - *Attention Mechanism*: a page of notes and NumPy code, on dot product and cosine, and on a
          sentence of ten tokens that one head reads, and then four.
        - *Notes On: Scaled Dot-Product Attention*, October 14, 2024: a blog post with "a brief
          introduction to scaled dot-product attention" and "a small experiment in which I visualize
          the query and key vector space", in a BERT model.
        - *Attention – a visual tour*, by Martin Stoffel: slides on queries, keys and values, the
          calculation step by step, several heads, and three variants of attention.
        - *An Intuition for Attention*, by Jay Mody, October 22, 2022: a blog post that starts from
          the lookup in a dictionary and builds an intuition for the formula "by deriving it from
          the ground up".
    """)
    return found
