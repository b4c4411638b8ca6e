"""A headless Chromium: a page after its scripts have run, and the errors in its console."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


def opened(address: str, width: int, profile: Path, seconds: float | None = None) -> tuple[str, list[str]]:
    """Return the page at `address` and the console's errors, at once or after `seconds` of the page's virtual time.

    `profile` is a folder for the browser's files.
    """
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += [f"--window-size={width},2000", f"--user-data-dir={profile}"]
    flags += [] if seconds is None else [f"--virtual-time-budget={1000 * seconds:.0f}"]
    done = subprocess.run(
        [CHROMIUM or "", *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


async def on_a_phone(address: str, profile: Path, script: str, seconds: float) -> str:
    """Return the value of `script` in the page at `address` after `seconds`, on a touch screen of 400 by 800."""
    aiohttp = pytest.importorskip("aiohttp")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    browser = subprocess.Popen(
        [CHROMIUM or "", *flags, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.DEVNULL
    )
    screen = {"width": 400, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    calls = [("Emulation.setDeviceMetricsOverride", screen), ("Page.navigate", {"url": address})]
    calls += [("Emulation.setTouchEmulationEnabled", {"enabled": True})]
    try:
        while not (told := profile / "DevToolsActivePort").exists() or not told.read_text():
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session:
            pages = await (await session.get(f"http://127.0.0.1:{told.read_text().split()[0]}/json")).json()
            page = next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page")
            async with session.ws_connect(page, max_msg_size=0) as socket:

                async def call(number: int, method: str, parameters: dict[str, object]) -> dict[str, Any]:
                    await socket.send_json({"id": number, "method": method, "params": parameters})
                    while (answer := await socket.receive_json()).get("id") != number:
                        pass
                    return answer

                for number, (method, parameters) in enumerate(calls):
                    await call(number, method, parameters)
                await asyncio.sleep(seconds)
                answer = await call(len(calls), "Runtime.evaluate", {"expression": script})
        return answer["result"]["result"]["value"]
    finally:
        browser.terminate()
        browser.wait()
