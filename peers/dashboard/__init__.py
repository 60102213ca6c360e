"""A run to look at: what one page, one terminal and one scrape show of it."""
