"""The driver starts Ray within a second of the command: it imports neither torch, transformers nor zarr."""

import subprocess
import sys


def test_the_loop_and_everything_that_it_drives_are_imported_without_torch_and_transformers() -> None:
    script = (
        "import sys, streamppo.loop, streamppo.driver.stages\n"
        "sys.exit(repr({'torch', 'transformers', 'sglang', 'zarr'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "''"
