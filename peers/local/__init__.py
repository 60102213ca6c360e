"""A local run: its processes, started, watched and stopped; its progress table, report and plot."""
