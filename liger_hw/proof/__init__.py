"""What was proven for which GPU, and how: written by the runs that saw it, merged, and shown; never typed by hand."""
