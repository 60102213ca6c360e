"""What the tests of several packages share: finding leftovers, waiting with a deadline, reading our own sources."""
