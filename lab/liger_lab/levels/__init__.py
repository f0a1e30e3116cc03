"""Record, merge and show the evidence that each op is right on each GPU."""
