"""`liger-hw bench`: every op against its peers and this machine's own limits; `liger-hw bench train`: whole steps.

`measure` knows clocks, `peers` other libraries, `operations` and `training` what is measured, `tables` and `page` how
it is shown. Results are plain data, written as JSON after every shape, so that an interrupted run keeps what it has.
"""
