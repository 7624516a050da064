"""What attention computes, and why it divides by the root of d_k: one page of pictures.

Run it with ``make lesson`` or ``python -m examples.lesson``.
"""
