"""What classes of torch 2.6 to 2.13 take and have, so that a script can be checked without torch."""

from __future__ import annotations

from typing import Final

from dtctl.lint import names

KEYWORDS: Final[dict[str, frozenset[str]]] = {
    names.DDP: frozenset(
        "module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb "
        "find_unused_parameters check_reduction gradient_as_bucket_view static_graph "
        "delay_all_reduce_named_params param_to_hook_all_reduce mixed_precision device_mesh "
        "skip_all_reduce_unused_params bucket_cap_mb_list batched_grad_copy forward_sync_buffers".split()
    ),
    names.FSDP: frozenset(
        "module process_group sharding_strategy cpu_offload auto_wrap_policy backward_prefetch mixed_precision "
        "ignored_modules param_init_fn device_id sync_module_states forward_prefetch limit_all_gathers "
        "use_orig_params ignored_states device_mesh".split()
    ),
    names.FULLY_SHARD: frozenset(
        "module mesh reshard_after_forward shard_placement_fn mp_policy offload_policy ignored_params "
        "dp_mesh_dims".split()
    ),
    names.SAMPLER: frozenset("dataset num_replicas rank shuffle seed drop_last".split()),
    names.INIT: frozenset(
        "backend init_method timeout world_size rank store group_name pg_options device_id _ranks".split()
    ),
}
"""Keyword arguments of a class or function: the union over these versions."""

DDP_ATTRIBUTES: Final = frozenset(
    "T_destination add_module apply batched_grad_copy bfloat16 broadcast_buffers bucket_bytes_cap "
    "bucket_bytes_cap_default bucket_bytes_cap_list buffer_hook buffers call_super_init children compile cpu "
    "cuda device device_ids device_mesh device_type dim double dump_patches eval extra_repr "
    "find_unused_parameters float forward forward_sync_buffers gather get_buffer get_extra_state "
    "get_parameter get_submodule gradient_as_bucket_view half ipu is_multi_device_module join join_device "
    "join_hook join_process_group load_state_dict logger mixed_precision module modules modules_buffers mtia "
    "named_buffers named_children named_module_buffers named_modules named_parameters no_sync output_device "
    "parameters parameters_to_ignore process_group reducer register_backward_hook register_buffer "
    "register_comm_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
    "register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook "
    "register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook "
    "require_backward_grad_sync require_forward_param_sync requires_grad_ scatter set_extra_state "
    "set_submodule share_memory state_dict static_graph to to_empty to_kwargs train training type "
    "use_side_stream_for_tensor_copies will_sync_module_buffers xpu zero_grad __class__ __dict__ __name__ "
    "__doc__ _orig_mod _set_static_graph _get_ddp_logging_data _register_builtin_comm_hook "
    "_register_fused_optim _register_comm_hook _sync_module_states _modules _parameters _buffers".split()
)
"""What a DistributedDataParallel has of its own; everything else is an attribute of its `module`."""
