"""`lockstep lab mutate`: small mutants of the engine, and whether any test or cell notices.

`draw` makes mutants with cosmic-ray's operators, `pool` keeps the copies of the repository they
live in and forks a process for every job, `trial` is what runs there, `reach` knows which tests and
cells reach a line, `campaign` puts it together, `command` is what the user types.
"""
