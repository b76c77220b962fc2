"""Take the picture of a report's page: python docs/draw_page.py RUN/report/index.html OUTPUT.png"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH_PX, HEIGHT_PX = 1000, 2400
COLORS = 128
"""Of the picture's palette: a third of the bytes, and no difference to see."""


def take(page: Path, output: Path) -> None:
    """The top of the page, in light colours."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        seen = browser.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX}, color_scheme="light")
        seen.goto(page.absolute().as_uri())
        picture = Image.open(io.BytesIO(seen.screenshot())).convert("RGB")
        browser.close()
    picture.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(output, optimize=True)


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
