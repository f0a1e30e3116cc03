"""Ops around attention: rotary embeddings, short convolutions, softmax and windows."""
