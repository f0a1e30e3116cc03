"""A module for verl to import first: VERL_USE_EXTERNAL_MODULES=liger_hw.integrations.verl, which its workers inherit.

Importing it installs the stand-in. `actor_rollout_ref.model.use_liger=True` and the fused log-probabilities of
`verl.utils.experimental.torch_functional` then reach this library. (`actor_rollout_ref.model.external_lib` takes the
module too, but is imported later: then `use_liger` alone does.)
"""

from liger_hw.integrations import install

install()
