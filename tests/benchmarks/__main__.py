"""``python -m tests.benchmarks [NAME] [--full] [--log]``."""

import sys

from tests.benchmarks.runner import main

sys.exit(main(sys.argv[1:]))
