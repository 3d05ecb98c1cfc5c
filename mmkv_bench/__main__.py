"""The command line as `python -m mmkv_bench`."""

import sys

from mmkv_bench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
