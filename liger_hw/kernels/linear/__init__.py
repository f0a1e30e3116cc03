"""Linear layers with adapters or with quantised weights."""
