"""What every run must keep, whatever goes wrong, checked from the files that its peers left."""
