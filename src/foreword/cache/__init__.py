"""The cache as pure bookkeeping: who is who (identity), who holds what (blocks), what is findable (index).

Knows no tensors, clocks, threads or requests; imports `base` and the standard library only.
"""
