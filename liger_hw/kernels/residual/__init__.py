"""Residual streams: hyper-connections and attention over layers."""
