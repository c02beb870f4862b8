"""Low-rank adapters: onto a model, into files, into its weights and out again."""

from .apply import (
    adapter_params,
    apply_lora,
    lora_config,
    lora_modules,
    lora_param_groups,
    merge_lora,
    merged_state_dict,
    saved_modules,
    unmerge_lora,
)
from .config import LoRAConfig
from .linear import LoRALinear
from .native import layer_from_json, layer_to_json, load_adapter, save_adapter
from .peft import save_adapter_peft
from .peft_load import load_adapter_peft
from .report import adapter_json, adapter_size, describe, trainable_line
from .stacked import AdapterLayout, adapter_layout, stack_adapter, write_stacked
from .targets import resolve_targets
