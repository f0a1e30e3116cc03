"""Norms of rows: RMS, layer, group, L2, polynomial and gated norms, and dynamic tanh."""
