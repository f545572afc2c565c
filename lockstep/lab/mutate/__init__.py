"""`lockstep lab mutate`: small mutants of the engine, and whether any test or cell notices."""
