"""Ops over the vocabulary: embeddings, heads, and losses of logits."""
