"""Take part on a machine that is used for other things."""
