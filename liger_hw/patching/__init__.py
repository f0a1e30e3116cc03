"""Recognise the parts of a model, prove the ops that compute them, and swap classes."""
