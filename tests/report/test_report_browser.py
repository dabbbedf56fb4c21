"""The report's page in a real browser, headless: readable in light and dark, nothing cut off, no network."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread
from report_cases import full_case
from sampling import sampled

from tconv_swap.report import to_json_dict
from tconv_swap.report.page import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCHEMES = {"light": 1, "dark": 0}
PROBE = Path(__file__).with_name("page_probe.js").read_text()

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def content() -> str:
    return page(to_json_dict(**full_case()))


def in_chromium(file: Path, scheme: str, width: int, *options: str) -> str:
    """What Chromium prints; any request to the network fails."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},2600"]
    command += [
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--user-data-dir={file.parent}/profile",
    ]
    done = subprocess.run(
        [*command, *options, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


class TestBrowser:
    @pytest.mark.parametrize(
        ("scheme", "width"), sampled([("light", 520), ("light", 1100), ("dark", 1100), ("dark", 520)], 2)
    )
    def test_readable_in_light_and_dark(self, scheme: str, width: int, content: str, tmp_path: Path) -> None:
        policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', content)
        assert policy is not None  # which forbids the probe too
        probed = content.replace(policy[0], "").replace("</body>", f"<script>{PROBE}</script></body>")
        (tmp_path / "probed.html").write_text(probed)
        shown = in_chromium(tmp_path / "probed.html", scheme, width, "--dump-dom")
        match = re.search(r'<pre id="probe">(.*?)</pre>', shown, flags=re.DOTALL)
        assert match is not None
        data = json.loads(html.unescape(match[1]))
        assert (data["page"] > 0.9) == (scheme == "light")
        texts = {entry["text"] for entry in data["found"]}
        assert {"2.08x faster", "1  up.0", "tf32: 417 TFLOP/s", "128x512x4x4 float32"} <= texts
        assert [entry for entry in data["found"] if entry["contrast"] < 4.5] == []
        assert len(data["drawings"]) == 3  # layers, the network, its ways
        for drawing in data["drawings"]:
            assert drawing["width"] > 0.85 * min(width - 60, 660)
            assert drawing["cut"] == []
        assert data["wide"] <= 0, "the page scrolls sideways"

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_a_screenshot_is_light_or_dark_and_shows_both_bars(
        self, scheme: str, content: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "report.html"
        file.write_text(content)
        in_chromium(file, scheme, 1100, f"--screenshot={tmp_path / 'shot.png'}")
        pixels = imread(tmp_path / "shot.png")[..., :3]
        assert (pixels.mean() > 0.5) == (scheme == "light")
        ours, before = (
            ((9, 105, 218), (129, 139, 152)) if scheme == "light" else ((68, 147, 248), (125, 133, 144))
        )
        for colour in (ours, before):
            near = abs(pixels * 255 - colour).max(axis=-1) < 3
            assert near.sum() > 2000, colour
