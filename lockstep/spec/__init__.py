"""Speculation: tokens that are guessed, and the target's own samples that say which were right."""
