"""Mixtures of experts: routing, grouped products, gates and sums."""
