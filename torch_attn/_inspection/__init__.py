"""What :func:`torch_attn.inspect` does: `record` watches a model; `result` is what it returns."""
