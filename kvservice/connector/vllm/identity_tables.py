"""Which of vLLM's settings are part of a block's identity, and which are not, with the reason. Data only.

Every setting is hashed unless it is listed here as left out. A setting that is in no table is hashed too, and fails a
test, so that somebody decides about it. Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping

# Reasons that apply to many settings. Each completes "the setting is left out because …".
ROUNDING = "it computes the same function and sums in another order, as one engine does from one batch to the next"
PLACE = "it says where weights, blocks or buffers lie, and how many there are"
WHEN = "it says when a token is computed, and beside which others"
AFTER = "it concerns what follows the last hidden state: logits, sampling, output"
BEFORE = "it concerns what comes before the token ids, or it is in the engine's hash of the input"
LOOKS = "it concerns logs, metrics, names or limits of requests"
NAMED = "it is a field of its own in the fingerprint"
DERIVED = "it follows from other settings, which are hashed"
WIRING = "it concerns processes, addresses or start-up"

# Sections of VllmConfig of which nothing is hashed.
SECTIONS_LEFT_OUT: Mapping[str, str] = {
    "scheduler_config": WHEN,
    "device_config": NAMED + ": cell_format",
    "offload_config": PLACE,
    "aux_output_config": AFTER,
    "watermark_config": AFTER,
    "structured_outputs_config": AFTER,
    "reasoning_config": AFTER,
    "observability_config": LOOKS,
    "logging_config": LOOKS,
    "profiler_config": LOOKS,
    "watchdog_config": WIRING,
    "quant_config": DERIVED + ": model_config.quantization, quantization_config, hf",
    "compilation_config": ROUNDING,
    "optimization_level": ROUNDING,
    "performance_mode": ROUNDING,
    "kv_transfer_config": "it has this connector's own options",
    "kv_events_config": LOOKS,
    "ec_transfer_config": "it copies the outputs of encoders, which are a function of input and weights",
    "ec_manager_config": PLACE,
    "weight_transfer_config": "it says how new weights arrive; a reset says that they are new",
    "instance_id": LOOKS,
    "shutdown_timeout": WIRING,
    "speculative_config": NAMED
    + ": draft, draft_layers, what is hashed of its model; other drafts keep no KV in blocks",
}

# Sections and settings of VllmConfig that are looked into, or hashed whole.
SECTIONS_HASHED = frozenset(
    {
        "model_config",
        "cache_config",
        "parallel_config",
        "load_config",
        "attention_config",
        "engram_config",
        "mamba_config",
        "kernel_config",
        "lora_config",
        "diffusion_config",
        "additional_config",
    }
)

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "model_config": {
        "model": NAMED + ": weights",
        "model_weights": NAMED + ": weights",
        "revision": NAMED + ": weights",
        "tokenizer": BEFORE,
        "tokenizer_mode": BEFORE,
        "tokenizer_revision": BEFORE,
        "skip_tokenizer_init": BEFORE,
        "dtype": NAMED + ": model_dtype",
        "quantization": NAMED,
        "allow_deprecated_quantization": "it is a permission",
        "seed": AFTER,
        "hf_config": NAMED + ": hf",
        "hf_text_config": NAMED + ": hf, text",
        "hf_config_path": NAMED + ": hf",
        "hf_overrides": NAMED + ": hf, which holds them",
        "config_format": NAMED + ": hf",
        "hf_token": "it is a credential",
        "is_submodel_config": DERIVED,
        "word_embeddings_untied_by_checkpoint": DERIVED + ": weights",
        "allowed_local_media_path": BEFORE,
        "allowed_media_domains": BEFORE,
        "max_model_len": "where a model reads it, it is hashed as max_model_len or rope_context (length_fields)",
        "spec_target_max_model_len": DERIVED,
        "enforce_eager": ROUNDING,
        "disable_cascade_attn": ROUNDING,
        "return_sampling_mask": AFTER,
        "max_logprobs": AFTER,
        "logprobs_mode": AFTER,
        "use_fp64_gumbel": AFTER,
        "enable_trace_replay": LOOKS,
        "enable_prompt_embeds": BEFORE,
        "served_model_name": LOOKS,
        "generation_config": NAMED + ": generation, for models that read it",
        "override_generation_config": NAMED + ": generation, for models that read it",
        "enable_sleep_mode": PLACE,
        "sleep_preserve_parameter_names": PLACE,
        "sleep_mode_backend": PLACE,
        "sleep_mode_offload_cudagraph": PLACE,
        "enable_nccl_comm_suspend": PLACE,
        "enable_cumem_allocator": PLACE,
        "logits_processors": AFTER,
        "io_processor_plugin": BEFORE,
        "renderer_num_workers": BEFORE,
        "pooler_config": AFTER,
    },
    "model_config.multimodal_config": {
        "limit_per_prompt": BEFORE,
        "enable_mm_embeds": BEFORE,
        "mm_device_do_normalize": ROUNDING,
        "mm_processor_cache_gb": PLACE,
        "mm_processor_cache_type": PLACE,
        "mm_hasher_algorithm": BEFORE,
        "mm_shm_cache_max_object_size_mb": PLACE,
        "mm_encoder_tp_mode": ROUNDING,
        "interleave_mm_strings": BEFORE,
        "skip_mm_profiling": WIRING,
        "mm_tensor_ipc": PLACE,
        "allow_missing_mm_embeddings": BEFORE,
        "mm_ipc_gpu_memory_gb": PLACE,
        "mm_encoder_fp8_scale_save_path": LOOKS,
        "mm_encoder_fp8_scale_save_margin": LOOKS,
    },
    "cache_config": {
        "block_size": NAMED + ": block_tokens",
        "user_specified_block_size": DERIVED,
        "kv_cache_layout": "a slot has a layout of its own; a format that keeps the engine's is named: packing",
        "prefix_match_unit": WHEN,
        "gpu_memory_utilization": PLACE,
        "cache_dtype": NAMED + ": kv_cache_dtype",
        "is_attention_free": DERIVED,
        "num_gpu_blocks_override": PLACE,
        "simple_cpu_offload_num_blocks": PLACE,
        "enable_prefix_caching": WHEN,
        "prefix_caching_hash_algo": NAMED + ": hash",
        "prefix_cache_retention_interval": WHEN,
        "mamba_page_size_padded": PLACE,
        "skip_page_size_padded": PLACE,
        "num_gpu_blocks": PLACE,
        "num_cpu_blocks": PLACE,
        "effective_attention_block_size": DERIVED,
        "kv_cache_size_tokens": PLACE,
        "kv_cache_max_concurrency": PLACE,
        "hash_block_size": BEFORE,
        "cache_hit_alignment_tokens": WHEN,
        "enable_mamba_shared_prefix_checkpoint": WHEN,
        "kv_cache_memory_bytes": PLACE,
        "kv_offloading_size": PLACE,
        "kv_offloading_backend": PLACE,
        "_block_size_resolved": DERIVED,
    },
    "parallel_config": {
        # A slot holds the heads of all ranks, so engines of different degrees share blocks on purpose.
        **dict.fromkeys(
            (
                "pipeline_parallel_size",
                "tensor_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
                "data_parallel_size",
                "data_parallel_size_local",
                "is_moe_model",
                "enable_hc_sp",
                "enable_expert_parallel",
                "enable_eplb",
                "eplb_config",
                "expert_placement_strategy",
                "enable_elastic_ep",
                "elastic_ep_max_dp_size",
                "enable_dbo",
                "ubatch_size",
                "dbo_decode_token_threshold",
                "dbo_prefill_token_threshold",
                "disable_custom_all_reduce",
                "dcp_kv_cache_interleave_size",
                "dcp_comm_backend",
                "dcp_q_replicate",
                "cp_kv_cache_interleave_size",
                "_allow_auto_resolve_cp_interleave_size",
                "world_size",
                "enable_batch_sharded_sampling",
            ),
            ROUNDING,
        ),
        **dict.fromkeys(
            (
                "data_parallel_rank",
                "data_parallel_rank_local",
                "data_parallel_master_ip",
                "data_parallel_rpc_port",
                "dp_sync_interval",
                "data_parallel_master_port",
                "data_parallel_backend",
                "data_parallel_external_lb",
                "data_parallel_hybrid_lb",
                "enable_ep_weight_filter",
                "max_parallel_loading_workers",
                "enable_shm_tensor_arena",
                "disable_nccl_for_dp_synchronization",
                "ray_workers_use_nsight",
                "ray_runtime_env",
                "placement_group",
                "distributed_executor_backend",
                "worker_extension_cls",
                "master_addr",
                "master_port",
                "node_rank",
                "nnodes",
                "numa_bind",
                "numa_bind_nodes",
                "numa_bind_cpus",
                "assigned_physical_gpu_ids",
                "distributed_timeout_seconds",
                "cpu_distributed_timeout_seconds",
                "rank",
                "_data_parallel_master_port_list",
                "_coord_store_port",
                "data_parallel_index",
                "_api_process_count",
                "_api_process_rank",
                "enable_fault_tolerance",
                "fault_tolerance_config",
            ),
            WIRING,
        ),
    },
    "load_config": {
        "download_dir": PLACE,
        "safetensors_load_strategy": WIRING,
        "safetensors_prefetch_num_threads": WIRING,
        "safetensors_prefetch_block_size": WIRING,
        "device": PLACE,
        "use_tqdm_on_load": LOOKS,
        "pt_load_map_location": PLACE,
    },
    "attention_config": {
        "backend": NAMED + ": cell_format",
        "flash_attn_max_num_splits_for_cuda_graph": ROUNDING,
        "tokenspeed_mla_min_split_kv": ROUNDING,
        "indexer_tp_shard_min_rows": ROUNDING,
        "tq_max_kv_splits_for_cuda_graph": ROUNDING,
        "sparse_mla_prefill_workspace_factor": PLACE,
        "flex_attn_block_m": ROUNDING,
        "flex_attn_block_n": ROUNDING,
        "flex_attn_q_block_size": ROUNDING,
        "flex_attn_kv_block_size": ROUNDING,
    },
    "attention_config.hisparse_config": {"device_buffer_size": PLACE, "eager_host_mirror": PLACE},
    "engram_config": dict.fromkeys(("cpu_offload", "embedding_across_dp", "dp_shared_memory", "use_thp"), PLACE),
    "mamba_config": {},
    "kernel_config": {
        "ir_op_priority": ROUNDING,
        "enable_flashinfer_autotune": ROUNDING,
        "enable_rocm_segmented_attn_autotune": ROUNDING,
        "enable_cutedsl_warmup": WIRING,
        "enable_jit_warmup": WIRING,
    },
    "lora_config": {
        "max_lora_rank": PLACE,
        "max_loras": PLACE,
        "fully_sharded_loras": ROUNDING,
        "max_cpu_loras": PLACE,
        "specialize_active_lora": ROUNDING,
        "max_lora_cls_labels": PLACE,
    },
    "diffusion_config": {},
}

# Settings that somebody decided to hash. Others are hashed because nobody has decided yet.
HASHED: Mapping[str, frozenset[str]] = {
    "model_config": frozenset(
        {
            "runner",
            "convert",
            "trust_remote_code",
            "code_revision",
            "quantization_config",
            "disable_sliding_window",
            "model_class_overrides",
            "model_impl",
            "multimodal_config",
        }
    ),
    "model_config.multimodal_config": frozenset(
        {
            "language_model_only",
            "mm_encoder_only",
            "mm_encoder_attn_backend",
            "mm_encoder_attn_dtype",
            "video_pruning_rate",
            "video_pruning_method",
            "mm_encoder_fp8_scale_path",
            # vLLM's hash covers what a request says of these, but not what its command line says.
            "media_io_kwargs",
            "mm_processor_kwargs",
        }
    ),
    "cache_config": frozenset(
        {
            "sliding_window",
            "kv_cache_dtype_skip_layers",
            "mamba_block_size",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_cache_mode",
            "replayssm_buffer_len",
            "use_replayssm",
            "use_kda_recoverssm",
            "kv_sharing_fast_prefill",
            "swa_bounded_replay",
        }
    ),
    "parallel_config": frozenset({"worker_cls", "all2all_backend"}),
    "load_config": frozenset({"load_format", "model_loader_extra_config", "ignore_patterns"}),
    "attention_config": frozenset(
        {
            "backend_per_kind",
            "flash_attn_version",
            "use_trtllm_attention",
            "disable_flashinfer_q_quantization",
            "mla_prefill_backend",
            "trtllm_ragged_backend",
            "minimax_m3_indexer_cp",
            "use_prefill_query_quantization",
            "indexer_kv_dtype",
            "indexer_sparse_logits",
            "hisparse_config",
            "use_non_causal",
            "sparse_mla_force_mqa",
            "minimax_m3_msa_decode_backend",
        }
    ),
    "attention_config.hisparse_config": frozenset(),
    "engram_config": frozenset(),
    "mamba_config": frozenset(
        {"backend", "enable_stochastic_rounding", "stochastic_rounding_philox_rounds", "ssu_algorithm"}
    ),
    "kernel_config": frozenset(
        {"moe_backend", "sparse_indexer_topk_backend", "linear_backend", "linear_backend_per_quant", "monokernel"}
    ),
    "lora_config": frozenset(
        {
            "lora_dtype",
            "target_modules",
            "default_mm_loras",
            "enable_tower_connector_lora",
            "enable_mixed_moe_lora_format",
            "enable_moe_shared_loras",
        }
    ),
    "diffusion_config": frozenset({"canvas_length", "max_denoising_steps"}),
}

# Entries of a model's configuration that make attention depend on how long a prompt may become.
LENGTH_ENTRIES = frozenset({"attention_chunk_size", "attn_temperature_tuning", "floor_scale"})

# Modules of vllm.model_executor.models that mention max_model_len, and why its value does not matter. An empty reason
# means that it changes what is computed.
LENGTH_MODULES: Mapping[str, str] = {
    "llama4": "",
    "mllama4": "",
    "embedding_gemma2": "",
    "cohere_compass": "",
    "transformers": "",
    "diffusion_gemma": "",
    "config": "it adjusts the configuration of other models, which is hashed afterwards",
    "colpali": "it only mentions the length",
    "deepseek_vl2": "it says for how many images graphs are captured",
    "minimax_m2": "it sets the size of a table of angles",
    "plamo3": "it sets the size of a table of angles",
    "deepseek_v2": "it sets the size of the indexer's buffers",
    "voxtral_realtime": "it says where audio ends",
    "parakeet": "it is the encoder's own length, which comes from the audio",
    "nano_nemotron_vl": "it limits the frames of a video, which are in the engine's hash",
    **dict.fromkeys(
        (
            "internvl",
            "kimi_vl",
            "qwen3_vl",
            "gemma4_mm",
            "deepseek_ocr",
            "step3_vl",
            "voxtral",
            "qwen2_5_vl",
            "kimi_k25",
            "qwen2_vl",
            "idefics3",
            "glm4_1v",
            "lfm2_vl",
            "minicpmv",
            "ernie45_vl",
            "gemma3_mm",
        ),
        "it limits the number and size of images, which are in the engine's hash",
    ),
}

# Modules that read the generation config while they build the model. gemma4 reads only which tokens to suppress.
GENERATION_MODULES = frozenset({"llama4", "mllama4", "diffusion_gemma", "gemma4_mm", "gemma4_mtp", "gemma4_unified"})

# Entries of a generation config that only sampling reads.
SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
        "max_length",
        "do_sample",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "_from_model_config",
        "suppress_tokens",
    }
)

# Environment variables that choose another arithmetic or other weights. They are hashed if they are set.
ENVIRONMENT_HASHED = (
    r"VLLM_FLOAT32_MATMUL_PRECISION|VLLM_BATCH_INVARIANT|VLLM_CPU_INT4_W4A8|VLLM_MXFP[48]_.*|VLLM_ROCM_.*"
    r"|VLLM_MARLIN_.*|VLLM_HUMMING_.*|VLLM_DEEPEPLL_NVFP4_DISPATCH|VLLM_(MOE_)?USE_DEEP_GEMM.*"
    r"|VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER|VLLM_B12X_MOE_FP4_FORCE_A16|VLLM_USE_FLASHINFER_MOE_INT4"
    r"|VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE|VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE"
    r"|VLLM_MOE_ROUTING_SIMULATION_STRATEGY|VLLM_MLA_DISABLE|VLLM_USE_TRITON_AWQ|VLLM_DISABLED_KERNELS"
    r"|VLLM_USE_HW_AGNOSTIC|VLLM_GDN_DECODE_KERNEL|VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE|VLLM_XPU_INC_WNA16_BACKEND"
    r"|VLLM_USE_OINK_OPS|VLLM_ENABLE_HPC_OPS|VLLM_PLUGINS|VLLM_TEST_FORCE_LOAD_FORMAT|VLLM_MODEL_REDIRECT_PATH"
    r"|VLLM_USE_MODELSCOPE|VLLM_SSM_CONV_STATE_LAYOUT|VLLM_KIMI_K3_.*"
    r"|NVIDIA_TF32_OVERRIDE|(DNNL|ONEDNN)_DEFAULT_FPMATH_MODE"  # of libraries below it: fewer bits of each product
)

ENVIRONMENT_LEFT_OUT: Mapping[str, str] = {
    r"VLLM_TARGET_DEVICE|VLLM_MAIN_CUDA_VERSION|MAX_JOBS|NVCC_THREADS|VLLM_USE_PRECOMPILED(_RUST)?"
    r"|VLLM_SKIP_(PRECOMPILED_)?VERSION_SUFFIX|VLLM_DOCKER_BUILD_CONTEXT|VLLM_BUILD_.*|VLLM_IMAGE_TAG"
    r"|CMAKE_BUILD_TYPE|VERBOSE|CUDA_HOME|LD_LIBRARY_PATH|VLLM_HAS_FLASHINFER_CUBIN": "it says how vLLM was built",
    r".*(LOG|DEBUG|USAGE|TRACE|PROFILING).*|NO_COLOR|FORCE_COLOR|VLLM_DO_NOT_TRACK|VLLM_PATTERN_MATCH_DEBUG"
    r"|VLLM_HTTP_MAX_REQUEST_BODY_SIZE"
    r"|VLLM_COMPUTE_NANS_IN_LOGITS|VLLM_RAISE_ON_LOGIT_NANS|VLLM_PROCESS_NAME_PREFIX|VLLM_GPU_SYNC_CHECK": LOOKS,
    r".*(HOST|PORT|_IP|_IPS|TIMEOUT(_S|_SECONDS|_KEEP_ALIVE)?|INTERVAL)|.*(NIXL|P2P|MOONCAKE|NCCL|DEEPEP_|RAY|RINGBUFFER).*"
    r"|VLLM_(NIC|DP|EC|RPC|MQ|MSGPACK|XLA|TPU|ELASTIC|WORKER)_.*|VLLM_API_KEY|VLLM_GPU_NIC_PCIE_MAPPING|LOCAL_RANK"
    r"|VLLM_RANDOMIZE_DP_DUMMY_INPUTS|VLLM_PP_LAYER_PARTITION|VLLM_XPU_PP_MICROBATCH|VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
    r"|VLLM_DISTRIBUTED_USE_SPLIT_GROUP|VLLM_ENABLE_V1_MULTIPROCESSING|VLLM_SERVER_DEV_MODE|VLLM_USE_SPINLOOP_EXT"
    r"|VLLM_ALLOW_INSECURE_SERIALIZATION|VLLM_DISABLE_REQUEST_ID_RANDOMIZATION|VLLM_DISABLE_PYNCCL"
    r"|VLLM_USE_RUST_.*|VLLM_RUST_FRONTEND_PATH|CUDA_VISIBLE_DEVICES|VLLM_CUDART_SO_PATH|VLLM_USE_LAYERNAME"
    r"|VLLM_.*CUDA_COMPATIBILITY.*|VLLM_SKIP_MODEL_NAME_VALIDATION|VLLM_LORA_RESOLVER_.*"
    r"|VLLM_ALLOW_RUNTIME_LORA_UPDATING|VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": WIRING,
    r".*(_ROOT|CACHE_DIR|CACHE_PATH|CACHE_SIZE_MB|CACHE_MB|BUFFER_SIZE|BUFFER_SIZE_MB|BUFFER_NAME|_FOLDER)|S3_.*"
    r"|VLLM_ASSETS_CACHE.*|VLLM_CPU_KVCACHE_SPACE|VLLM_CPU_OMP_THREADS_BIND|VLLM_CPU_NUM_OF_RESERVED_CPU"
    r"|VLLM_WEIGHT_OFFLOADING_.*|VLLM_KV_OFFLOAD_.*|VLLM_USE_SIMPLE_KV_OFFLOAD|VLLM_WSL2_.*|VLLM_KV_CACHE_LAYOUT"
    r"|VLLM_FASTSAFETENSORS_QUEUE_SIZE|VLLM_MEMORY_PROFILER_.*|VLLM_ADAPTIVE_VERIFICATION_.*"
    r"|VLLM_SPARSE_INDEXER_MAX_LOGITS_MB|VLLM_ALLOW_LONG_MAX_MODEL_LEN|VLLM_ENABLE_STARTUP_PLAN"
    r"|VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE|VLLM_ZENTORCH_WEIGHT_PREPACK|VLLM_REPLICATE_EMBED"
    r"|VLLM_XPU_FORCE_N_CONTIG_WEIGHT": PLACE,
    r"VLLM_(MEDIA|IMAGE|VIDEO|AUDIO|MAX_AUDIO|MAX_EMBED|MAX_IMAGE|MAX_MEDIA|CHAT)_.*|VLLM_USE_FASTOKENS"
    r"|VLLM_V1_OUTPUT_PROC_CHUNK_SIZE|VLLM_MAX_(N_SEQUENCES|COMPLETION_PROMPTS|STOP_STRINGS)|VLLM_MAX_(NUM_)?BAD_WORDS.*"
    r"|VLLM_GPT_OSS_.*|VLLM_SYSTEM_START_DATE|VLLM_(TOOL|ENFORCE|ENABLE_RESPONSES|ENABLE_COHERE|USE_EXPERIMENTAL)_.*"
    r"|VLLM_V1_USE_OUTLINES_CACHE": BEFORE + ", or it concerns answers",
    r"VLLM_USE_FLASHINFER_SAMPLER|VLLM_XPU_USE_SAMPLER_KERNEL|VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": AFTER,
    r"VLLM_TRITON_.*|VLLM_.*COMPILE.*|VLLM_.*CUDAGRAPH.*|VLLM_.*INDUCTOR.*|VLLM_.*AOT.*|VLLM_ENABLE_PREGRAD_PASSES"
    r"|VLLM_USE_BYTECODE_HOOK|VLLM_CPU_CI_ENV|VLLM_CPU_ATTN_SPLIT_KV|VLLM_FLASHINFER_(ALLREDUCE|AUTOTUNE).*|VLLM_ALLREDUCE_.*"
    r"|VLLM_USE_DIRECT_DCP_.*|VLLM_DCP_Q_REPLICATE|VLLM_DEEP_GEMM_WARMUP|VLLM_USE_FUSED_MOE_GROUPED_TOPK"
    r"|VLLM_MOE_SKIP_PADDING|VLLM_ENABLE_GEMM_RS|VLLM_DBO_COMM_SMS|VLLM_DISABLE_SHARED_EXPERTS_STREAM"
    r"|VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION|VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD"
    r"|VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD|VLLM_USE_V2_MODEL_RUNNER|VLLM_LORA_DISABLE_PDL"
    r"|VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD|VLLM_STEP5_SHARD_SP_SHARED_EXPERT"
    r"|VLLM_LORA_ENABLE_DUAL_STREAM|VLLM_SKIP_P2P_CHECK|VLLM_TUNED_CONFIG_FOLDER": ROUNDING,
}
