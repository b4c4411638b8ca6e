"""The tests that `just quick` leaves out: those that take long, by a file that a run of all tests is read from.

    pytest -n 2 --junitxml=all.xml
    python -m tests.durations all.xml       writes durations.txt

A function is listed with the seconds of its longest case, set-up included. A function that is not there is quick.
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_name("durations.txt")
QUICK_S = 0.15


def listed() -> set[str]:
    """The listed functions, as pytest names them."""
    return {line.split()[1] for line in FILE.read_text().splitlines()}


def longest(results: Path) -> dict[str, float]:
    """The seconds of each function's longest case in a file of `--junitxml`."""
    found = defaultdict[str, float](float)
    for case in ElementTree.parse(results).iter("testcase"):
        # "tests.unit.test_x.TestClass": folders, the file and perhaps a class.
        *parts, last = case.attrib["classname"].split(".")
        of_class = [last] if last.startswith("Test") else []
        file = "/".join(parts if of_class else [*parts, last]) + ".py"
        name = "::".join([file, *of_class, case.attrib["name"].partition("[")[0]])
        found[name] = max(found[name], float(case.attrib["time"]))
    return found


def write(results: Path) -> None:
    """List the functions that take longer than `QUICK_S`, the longest first."""
    slow = {name: seconds for name, seconds in longest(results).items() if seconds > QUICK_S}
    rows = sorted(slow.items(), key=lambda row: (-row[1], row[0]))
    FILE.write_text("".join(f"{seconds:.2f} {name}\n" for name, seconds in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
