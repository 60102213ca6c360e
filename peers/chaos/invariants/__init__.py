"""Check what every run must keep, whatever goes wrong, from the files that its peers left."""
