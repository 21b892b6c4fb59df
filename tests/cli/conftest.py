"""The command line's tests see no terminal and no variable of the person who runs them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "QUANTKIT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
