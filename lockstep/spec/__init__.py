"""Speculation: draft tokens, and the target's own samples that decide which of them are right."""
