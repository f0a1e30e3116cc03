"""The parity rule, and the cases of every op that it is checked on."""
