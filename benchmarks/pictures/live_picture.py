"""Draw docs/images/live.svg: the live view of an ended run, as it was after one of its updates.

    python benchmarks/pictures/live_picture.py runs/math --update 640 --to docs/images/live.svg [--columns 120]
        [--rows 30]

The view is made from the run's metrics.jsonl; only the memory is this machine's.
"""

import argparse
import re
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[2]))

from streamppo.config import file as configfile
from streamppo.telemetry import host, metrics_file
from streamppo.telemetry.live.display import empty_state
from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.live.view import view

WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's SVG format without web fonts."""


def state_at(folder: Path, version: int) -> RunState:
    """The state of the run in `folder` after the update that made `version`."""
    found = empty_state(configfile.load(folder / configfile.CONFIG), Path("runs") / folder.name)
    for line in metrics_file.read(folder):
        found.add(line)
        if line.get("update") == version:
            break
    found.memory, found.doing = host.memory_in_use(), f"update {version + 1}"
    return found


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--update", type=int, required=True, help="the version that was the newest")
    parser.add_argument("--to", type=Path, required=True, help="the picture to write")
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--rows", type=int, default=30)
    args = parser.parse_args()
    rows = view(state_at(args.run, args.update), args.columns, args.rows)
    console = Console(record=True, width=args.columns, file=sys.stdout, highlight=False, force_terminal=True)
    console.print(Text("\n").join(rows))
    args.to.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(args.to), title="streamppo run configs/math.toml", theme=MONOKAI, code_format=WITHOUT_FONTS)


if __name__ == "__main__":
    main()
