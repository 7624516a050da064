"""`attn` inside other libraries. These libraries are imported only when a function needs them."""
