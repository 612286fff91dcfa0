"""Looks come quickly, and admin calls have a key."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.discovery.assembly.LOOK_EVERY_S", 0.01)
    monkeypatch.setenv("ADMIN_KEY", "s3cret")
