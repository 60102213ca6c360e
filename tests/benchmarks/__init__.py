"""Measurements, side by side in one run: ``python -m tests.benchmarks NAME``. A module here with a ``run`` is one."""
