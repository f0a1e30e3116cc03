"""What is right, and inputs to tell by: the parity rule and the cases of every op."""
