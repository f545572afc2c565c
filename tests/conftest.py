"""Shared by all tests: GPU tests are collected everywhere and skipped where there is no GPU;
waiting threads sleep instead of spinning."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # set before torch and numba start threads: several test processes share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
