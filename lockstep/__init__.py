"""Lockstep: LLM inference whose answers are a function of model, prompt, parameters and seed, and of nothing else.

Importing this package imports nothing else: the plan and the page bookkeeping work without torch.
"""

__version__ = "0.1.0"
