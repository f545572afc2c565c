"""The engine's surface. `from lockstep import LLM` is the way in."""
