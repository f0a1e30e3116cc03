"""Measure ops, losses and training steps beside other libraries.

`measure` has the clocks, `peers` the other libraries. `operations`, `losses` and `training` run the measurements;
`formatting` and `charts` show them. `run_file` writes plain JSON after every shape, so an interrupted run keeps its
results. `demo` and `report` serve `liger-hw demo`.
"""
