"""PyTorch's own samples of scaled_dot_product_attention, run through the operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from _accuracy import check
from helpers import DTYPES, Inputs, kept

[OP_INFO] = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]


def samples(dtype: torch.dtype) -> Iterator[tuple[Inputs, dict[str, object]]]:
    for sample in OP_INFO.sample_inputs(torch.get_default_device(), dtype):
        options = dict(sample.kwargs)
        yield Inputs(sample.input, *sample.args, attn_mask=options.pop("attn_mask", None)), options


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples(dtype: torch.dtype) -> None:
    count = 0
    for inputs, options in samples(dtype):
        p = options.pop("dropout_p")
        mask = kept(inputs, p, **options) if p else None
        check(inputs, gradients=True, dropout_mask=mask, dropout_p=p, **options)
        count += 1
    assert count >= 25


def test_dtypes_are_the_builtins() -> None:
    assert OP_INFO.supported_dtypes("cpu") == set(DTYPES)
