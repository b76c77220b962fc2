"""The documentation as a site: built strictly, so that a link into nothing or a page outside of the menu fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built(folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(folder), *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_the_first_page_is_the_readme_with_its_links(site):
    page = (site / "index.html").read_text()
    assert "scu-trainer" in page and 'href="guide/"' in page and 'href="examples/"' in page
    assert "](" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_every_field_has_a_row(site):
    from dataclasses import fields

    from scu_trainer.settings import DataSettings, MemorySettings
    from scu_trainer.settings.sensors import SensorSettings

    page = (site / "reference/index.html").read_text()
    for kind in (DataSettings, MemorySettings, SensorSettings):
        absent = [field.name for field in fields(kind) if field.metadata.get("help") and f">{field.name}<" not in page]
        assert absent == []


def test_nothing_is_asked_of_another_machine(site):
    """No fonts, scripts or pictures from elsewhere."""
    for page in site.rglob("*.html"):
        assert re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="https?://', page.read_text()) == [], page


def test_a_link_into_nothing_is_an_error(tmp_path):
    copy = tmp_path / "docs"
    copy.mkdir()
    (copy / "index.md").write_text("[there](nowhere.md)")
    config = (ROOT / "mkdocs.yml").read_text().partition("nav:\n  - Start")[0].replace("hooks: [docs/site.py]\n", "")
    (tmp_path / "mkdocs.yml").write_text(config)
    done = built(tmp_path / "out", "-f", str(tmp_path / "mkdocs.yml"))
    assert done.returncode == 1 and "nowhere.md" in done.stderr
