"""A headless Chromium for tests that open pages. It is a process of its own, without network, started once."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@dataclass
class Visit:
    """An open page, and what it did that a page must not do: errors, and addresses that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    @property
    def foreign(self) -> list[str]:
        """Addresses beside files and what stands in the page itself."""
        return [address for address in self.addresses if not address.startswith(("file://", "data:"))]

    @property
    def overflow_px(self) -> int:
        """By how much the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Skips the test where there is no Chromium; under CI that is a failure."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        reason = "no Chromium here: apt-get install chromium"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@contextlib.contextmanager
def visit(started: Any, file: Path, width_px: int, scheme: str) -> Iterator[Visit]:
    """``file`` opened in a window of that width, ``scheme`` light or dark."""
    page = started.new_page(viewport={"width": width_px, "height": 900}, color_scheme=scheme)
    found = Visit(page)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("console", lambda said: found.errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda request: found.addresses.append(request.url))
    page.goto(file.absolute().as_uri())
    yield found
    page.close()
