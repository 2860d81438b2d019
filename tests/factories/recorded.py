"""Recorded runs, and a browser that opens the pages made of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest


RUNS = Path(__file__).parents[1] / "data" / "runs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
_HEAD = """<script>window.seen = {errors: []};
addEventListener("error", e => seen.errors.push(String(e.message || e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", e => seen.errors.push(String(e.reason)));
console.error = (...words) => seen.errors.push(words.join(" "));</script>"""


def in_browser(page: Path, folder: Path, script: str, width: int = 1200) -> tuple[dict[str, Any], str]:
    """
    Open a page from disk in headless Chromium without a network, run `script`, whose variable `seen` is returned with the errors
    that occurred, and what Chromium printed.
    """
    copy, html = folder / "opened.html", page.read_text(encoding="utf-8")
    tail = f'<script>{script}\nconst out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);</script>'
    copy.write_text(
        html.replace("<head>", f"<head>{_HEAD}", 1).replace("</body>", f"{tail}</body>", 1), encoding="utf-8"
    )
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000"]
    command += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'chromium'}",
    ]
    done = subprocess.run([*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=300)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    return json.loads(unescape(match[1])), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
