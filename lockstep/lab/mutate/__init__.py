"""`lockstep lab mutate`: small mutants of the engine, and whether any test or cell notices.

`draw` makes mutants with cosmic-ray's operators, `tree` keeps the copies of the repository they
live in, `pool` forks a process for every job and `trial` is what runs there, `reach` knows which
tests and cells reach a line, `campaign` puts it together, `command` is what the user types.
"""
