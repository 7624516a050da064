"""Keys and values of earlier tokens: `paged` puts them in pages, `quantize` makes them 8 bits."""
