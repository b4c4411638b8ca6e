"""Draw docs/images/watch.png: the live page of a run, rendered by a headless Chromium.

python benchmarks/pictures/watch_picture.py runs/math --update 150 --row 5 --to docs/images/watch.png [--dark]
        [--width 1400]
    [--height 2900] [--top 0] [--with runs/math-2]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[2]))

from streamppo.commands.look.watching import server

SCALE = 0.75
"""Pixels of the picture per pixel of the page."""
SECONDS = 8
"""Virtual time of the page until the picture is taken."""


@contextmanager
def served(run: Path, others: list[Path]) -> Generator[str]:
    """Serve the page during the block; yields its address."""
    found = server.listen("127.0.0.1", 0)
    application = server.application(run.resolve(), [path.resolve() for path in others], None)
    serving = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [found]})
    thread.start()
    while not serving.started:
        time.sleep(0.05)
    try:
        yield server.address(found, "127.0.0.1", None)
    finally:
        serving.should_exit = True
        thread.join()


def draw(address: str, to: Path, width: int, height: int, *, dark: bool, top: int = 0) -> None:
    """Write a page as a picture, without its first `top` rows of pixels; all sizes are in the page's pixels."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium is installed (Debian: apt-get install chromium)")
    to.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--window-size={width},{top + height}", f"--force-device-scale-factor={SCALE}"]
    flags += [f"--virtual-time-budget={1000 * SECONDS}", f"--screenshot={to.resolve()}"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([browser, *flags, f"--user-data-dir={profile}", address], check=True, capture_output=True)
    if top:
        from PIL import Image

        picture = Image.open(to)
        picture.crop((0, round(top * SCALE), *picture.size)).save(to, optimize=True)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument(
        "--with", dest="others", type=Path, action="append", default=[], help="a run to compare it with"
    )
    parser.add_argument("--update", type=int, required=True, help="the version that the batch made")
    parser.add_argument("--row", type=int, required=True, help="the trajectory of the batch that is open")
    parser.add_argument("--colour", default="log-prob", help="the number that colours its tokens")
    parser.add_argument("--to", type=Path, required=True, help="the picture to write")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=2900)
    parser.add_argument("--top", type=int, default=0, help="pixels of the page to leave out above (extra `plots`)")
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    place = urlencode({"update": args.update, "row": args.row, "colour": args.colour})
    with served(args.run, args.others) as address:
        draw(f"{address}#{place}", args.to, args.width, args.height, dark=args.dark, top=args.top)


if __name__ == "__main__":
    main()
