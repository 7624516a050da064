"""A plugin of pytest: of all tests every ATTN_EVERY-th."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = items[:: int(os.environ["ATTN_EVERY"])]
