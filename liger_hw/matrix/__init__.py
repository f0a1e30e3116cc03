"""What was proven for which GPU, and how."""
