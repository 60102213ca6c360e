"""What never leaves one machine: private text as token shards, and the exact position of reading them."""
