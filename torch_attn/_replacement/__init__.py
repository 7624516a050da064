"""Switches that replace PyTorch's functions: what they share, and the one of FlexAttention."""
