"""`python -m examples.demo`: the operator at work on real input, beside PyTorch's built-in."""
