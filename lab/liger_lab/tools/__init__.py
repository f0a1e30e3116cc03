"""Programs that write pages, plant mistakes, compare versions and build packages, in a checkout."""
