"""The engine's public API. `from lockstep import LLM` is the entry point."""
