"""`lockstep lab mutate`: small mutants of the engine, and whether any test or cell notices.

`draw` makes mutants, `pool` keeps the trees they live in and forks a process for every job, `reach`
knows who reaches a line, `campaign` puts it together.
"""
