"""``python -m tests.benchmarks [NAME] [--smoke | --full] [--log]``, or ``--page``."""

import sys

from tests.benchmarks._supervised import supervised
from tests.benchmarks.runner import main

words = sys.argv[1:]
sys.exit(supervised(next((word for word in words if word[0] != "-"), "the list"), lambda: main(words)))
