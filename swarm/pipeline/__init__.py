"""The way of a microbatch through the stages, and its repair when a replica fails."""
