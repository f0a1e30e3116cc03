"""Define the parity rule of ops."""
