"""What a person sees in a terminal: events and errors in words, and Ctrl-C."""
