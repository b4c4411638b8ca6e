"""Draw docs/images/debugging-report.png: the report of one or several runs, rendered by a headless Chromium.

python benchmarks/pictures/report_picture.py runs/math [runs/math-2 runs/math/replays/1.json] --to
        docs/images/report.png
    [--dark] [--width 1400] [--height 1500]
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.pictures.watch_picture import draw
from streamppo.commands.look.views import report


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, and replays of them")
    parser.add_argument("--to", type=Path, required=True, help="the picture to write")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1500)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        report(args.runs, page)
        draw(page.as_uri(), args.to, args.width, args.height, dark=args.dark)


if __name__ == "__main__":
    main()
