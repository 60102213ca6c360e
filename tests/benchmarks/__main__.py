"""``python -m tests.benchmarks [NAME] [--smoke | --full] [--log]``."""

import sys

from tests.benchmarks.runner import main

sys.exit(main(sys.argv[1:]))
