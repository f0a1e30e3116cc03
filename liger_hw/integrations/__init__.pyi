# Written by `python -m liger_lab.tools.stubs` from the names of __init__.py.
from liger_hw.integrations.hub_kernels import register_hub_kernels as register_hub_kernels
from liger_hw.integrations.hub_kernels import unregister_hub_kernels as unregister_hub_kernels
from liger_hw.integrations.lightning_callback import LigerHwLightningCallback as LigerHwLightningCallback
from liger_hw.integrations.token_metrics import TokenMetrics as TokenMetrics
from liger_hw.integrations.trainer_callback import LigerHwActivationsCallback as LigerHwActivationsCallback
from liger_hw.integrations.trainer_callback import LigerHwCallback as LigerHwCallback
from liger_hw.integrations.trl import accelerate_trl as accelerate_trl
from liger_hw.integrations.trl import restore_trl as restore_trl
from liger_hw.stand_in.finder import install as install
from liger_hw.stand_in.finder import is_installed as is_installed
from liger_hw.stand_in.finder import uninstall as uninstall
from liger_hw.stand_in.megatron import apply_liger_kernel_to_megatron as apply_liger_kernel_to_megatron
from typing import Any
