"""Define the parity rule and the cases of every op."""
