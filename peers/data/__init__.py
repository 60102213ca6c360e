"""A trainer's data: built shards, text files, or the text that comes with Python."""
