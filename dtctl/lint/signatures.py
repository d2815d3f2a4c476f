"""Arguments and attributes of classes of torch 2.6 to 2.13, with which a script can be checked without torch."""

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
    (
        "T_destination _abc_impl _accum_grad_hooks _active_ddp_module _apply _assign_modules_buffers "
        "_authoritative_rank _backward_hooks _backward_pre_hooks _bucket_config _buffers "
        "_build_debug_param_to_name_mapping _build_params_for_reducer _call_impl _check_and_sync_module_buffers "
        "_check_comm_hook _check_default_group _check_global_requires_backward_grad_sync _check_reducer_finalized "
        "_check_sync_bufs_post_fwd _check_sync_bufs_pre_fwd _clear_grad_buffer _comm_hooks _compiled_call_impl "
        "_ddp_init_helper _ddp_sink_clone _default_broadcast_coalesced _delay_all_reduce_all_params "
        "_delay_all_reduce_params _delay_grad_buffer _delay_grad_views _delayed_all_reduce_hook "
        "_distributed_broadcast_coalesced _distributed_rank _find_common_rank _fire_reducer_autograd_hook "
        "_forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks "
        "_forward_pre_hooks_with_kwargs _get_active_ddp_module _get_backward_hooks _get_backward_pre_hooks "
        "_get_data_parallel_params _get_ddp_logging_data _get_name _get_parameters _has_rebuilt_buckets "
        "_inside_ddp_forward _is_full_backward_hook _lazy_init _lazy_init_ran _load_from_state_dict "
        "_load_state_dict_post_hooks _load_state_dict_pre_hooks _log_and_throw _match_all_reduce_for_bwd_pass "
        "_match_unused_params_allreduce _maybe_warn_non_full_backward_hook _module_parameters "
        "_module_wait_for_copy_hook _modules _mp_stream _named_members _non_persistent_buffers_set _orig_mod "
        "_parameters _passing_sync_batchnorm_handle _post_forward _pre_forward _register_accum_grad_hook "
        "_register_buffer_comm_hook _register_builtin_comm_hook _register_comm_hook _register_delay_all_reduce_hook "
        "_register_fused_optim _register_load_state_dict_pre_hook _register_state_dict_hook _remove_autograd_hooks "
        "_replicate_for_data_parallel _root_copy_hook _run_ddp_forward _save_to_state_dict "
        "_set_ddp_runtime_logging_sample_rate _set_ddp_sink_clone _set_params_and_buffers_to_ignore_for_model "
        "_set_sparse_metadata _set_static_graph _setup_in_backward_optimizers _slow_forward _state_dict_hooks "
        "_state_dict_pre_hooks _static_graph_delay_allreduce_enqueued _submodule_to_event _sync_buffers "
        "_sync_final_model _sync_module_buffers _sync_module_states _update_process_group _use_python_reducer "
        "_version _wrapped_call_impl add_module apply batched_grad_copy bfloat16 broadcast_bucket_size "
        "broadcast_buffers bucket_bytes_cap bucket_bytes_cap_default bucket_bytes_cap_list buffer_hook buffers "
        "call_super_init children compile cpu cuda device device_ids device_mesh device_type dim double dump_patches "
        "eval extra_repr find_unused_parameters float forward forward_sync_buffers gather get_buffer get_extra_state "
        "get_parameter get_submodule gradient_as_bucket_view half ipu is_multi_device_module join join_device "
        "join_hook join_process_group load_state_dict logger mixed_precision module modules modules_buffers mtia "
        "named_buffers named_children named_module_buffers named_modules named_parameters no_sync output_device "
        "parameters parameters_to_ignore process_group reducer register_backward_hook register_buffer "
        "register_comm_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
        "register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook "
        "register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook "
        "require_backward_grad_sync require_forward_param_sync requires_grad_ scatter set_extra_state set_submodule "
        "share_memory skip_all_reduce_unused_params state_dict static_graph to to_empty to_kwargs train training type "
        "use_side_stream_for_tensor_copies will_sync_module_buffers xpu zero_grad"
    ).split()
)
"""Attributes of DistributedDataParallel itself; all others are attributes of its `module`.

The set has the names in the class and those that methods of the class and of nn.Module set, from torch 2.13 and older
versions.
"""
