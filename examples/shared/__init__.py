"""Parts that several examples share."""
