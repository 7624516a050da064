"""A plugin of pytest: of all tests every ATTN_EVERY-th, but for those that measure memory.

Under a sanitizer that says nothing, and their long sequences take minutes.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    others = [item for item in items if "peak" not in item.name]
    items[:] = others[:: int(os.environ["ATTN_EVERY"])]
