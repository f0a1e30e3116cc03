"""Activations and gated products of MLPs, with or without their projections."""
