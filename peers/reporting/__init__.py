"""A run's figures for trackers of experiments: ``--report-to``."""
