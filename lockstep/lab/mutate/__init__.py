"""`lockstep lab mutate`: small mutants of the engine, and whether any test or cell notices.

`draw` makes mutants with cosmic-ray's operators, `tree` keeps the copies of the repository they
live in, `serve` runs tests and cells in forked processes, `reach` knows which of them reach a line,
`campaign` puts it together, `command` is what the user types.
"""
