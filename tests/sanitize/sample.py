"""A plugin of pytest: keeps every ATTN_EVERY-th test, and none of a peak of memory.

Under a sanitizer a peak says nothing, and its long sequence takes minutes.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    others = [item for item in items if "peak" not in item.name]
    items[:] = others[:: int(os.environ["ATTN_EVERY"])]
