"""`python -m streamppo`: the same as `streamppo`."""

import sys

from streamppo.cli import main

if __name__ == "__main__":
    sys.exit(main())
