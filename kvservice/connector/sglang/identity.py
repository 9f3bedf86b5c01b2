"""SGLang's resolved configuration as named fields of a fingerprint: everything that may change the bytes of a page.

Only settings that differ from SGLang's default are named, because its version is a field too. What is left out stands
here with the reason; a setting in no table is named. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.runtime_context import get_context, get_server_args, process_model_config
from sglang.version import __version__

from kvservice.connector.config_text import PLAIN_ROPES, flat_fields, parts_of, text_of, without
from kvservice.connector.sglang.options import SGLangOptions
from kvservice.connector.sglang.sharing import ModelSource
from kvservice.connector.weights import changed_since, weights_identity
from kvservice.errors import ConfigError, UnnamedWeights, UnsupportedLayout

PLACE = "it says where weights, pages or buffers lie, and how many there are"
WHEN = "it says when a token is computed, and beside which others"
AFTER = "it concerns what follows the last hidden state: logits, sampling, output"
ROUNDING = "it computes the same function and sums in another order, as one engine does from one batch to the next"
LOOKS = "it concerns logs, metrics, names, processes or limits of requests"
NAMED = "it is a field of its own in the fingerprint"

# SGLang's namespaces of settings that are not named.
SECTIONS_LEFT_OUT: Mapping[str, str] = {
    "memory": PLACE,
    "schedule": WHEN,
    "parallel": ROUNDING,
    "disagg": PLACE,
    "serving": LOOKS,
    "observability": LOOKS,
    "exec.graph": ROUNDING,
    "exec.comm": ROUNDING,
    "exec.overlap": WHEN,
    "exec.offload": PLACE,
}
# Whose notes say that weights were changed in place: from a disk, and in any way with which a new version is given.
WEIGHT_CHANGES = frozenset({"model_runner.update_model_fields", "scheduler.weight_version"})
# Settings with which the weights come from another process, which may have loaded other files or changed them since.
WEIGHTS_OF_OTHERS: Mapping[str, str] = {
    "load_format": "remote_instance",
    "speculative_draft_load_format": "remote_instance",
    "weight_cache_mode": "client",
}
# Settings of these sections that are named all the same, because they change the numbers.
NAMED_ALL_THE_SAME = frozenset({"forward_hooks", "enable_quant_communications"})
# Environment variables that choose other code, other weights or fewer bits. They are named if they are set.
ENVIRONMENT_NAMED = (
    r"SGLANG_EXTERNAL_.*|SGLANG_(PLUGINS|PLATFORM|USE_MODELSCOPE|USE_MLX|DEBUG_REVERT_PR|FORCE_FUSED_OP_BACKEND)"
    r"|SGLANG_.*(FP4|FP8|INT4|INT8|BF16|FP32|F16|W4A|Q8KV|QUANT|DTYPE|MXSCALE).*"
    r"|SGLANG_(SKIP_SOFTMAX|HUMMING|MINICPM|MAMBA|SIMULATE)_.*|SGLANG_USE_(SAGE_ATTENTION_IMPL|CUSTOM_ROUTER_SUM)"
    r"|SGLANG_DSV4_.*LAYOUT|SGLANG_OPT_USE_ONLINE_COMPRESS|SGLANG_GLM_NEXTN_MOE_PTPC|SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ"
    r"|SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD|SGLANG_IMAGE_MAX_PIXELS|SGLANG_RESIZE_RESAMPLE"
    r"|FLASHINFER_NVFP4_4OVER6.*|DEEP_NORMAL_MODE_USE_INT8_QUANT"
    r"|NVIDIA_TF32_OVERRIDE|(DNNL|ONEDNN)_DEFAULT_FPMATH_MODE"  # of libraries below it
)
# What Kubernetes gives a pod for each Service. With one named sglang-fp8 these begin as SGLang's do, and differ by pod.
ENVIRONMENT_OF_KUBERNETES = r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
# Settings with which pages are not shared with engines of other kinds, and the values that are none.
CHANGES_PAGES: Mapping[str, tuple[object, ...]] = {
    "quantization": (None,),
    "json_model_override_args": (None, "", "{}"),
    "lora_paths": (None, [], {}),
    "speculative_algorithm": (None,),
    "pp_size": (None, 1),
    **dict.fromkeys(NAMED_ALL_THE_SAME, (None, False, [])),
}
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "base_gpu_id",
            "gpu_id_step",
            "watchdog_timeout",
            "soft_watchdog_timeout",
            "sleep_on_idle",
            "use_ray",
            "custom_sigquit_handler",
            "numa_node",
            "gc_threshold",
            "weight_loader_disable_mmap",
            "weight_loader_prefetch_checkpoints",
            "weight_loader_prefetch_num_threads",
            "weight_loader_drop_cache_after_load",
            "download_dir",
            "model_checksum",
            "weight_cache_mode",
            "weight_cache_socket",
            "weight_cache_timeout",
            "enable_memory_saver",
            "enable_weights_cpu_backup",
            "enable_draft_weights_cpu_backup",
            "max_loaded_loras",
            "max_loras_per_batch",
            "lora_eviction_policy",
        ),
        PLACE,
    ),
    **dict.fromkeys(
        (
            "random_seed",
            "sampling_backend",
            "grammar_backend",
            "enable_custom_logit_processor",
            "enable_return_hidden_states",
            "enable_return_routed_experts",
            "disable_outlines_disk_cache",
        ),
        AFTER,
    ),
    "disable_flashinfer_autotune": ROUNDING,
    "model_path": NAMED + ": weights",
    "revision": NAMED + ": weights",
    "lora_paths": NAMED + ": adapter, with the bytes of each",
    "speculative_draft_model_path": NAMED + ": draft, if it is not that of the model",
    "json_model_override_args": NAMED + ": hf, which holds them",
    "dtype": NAMED + ": model_dtype, as resolved",
    "context_length": NAMED + ": where angles depend on it",
    "quantization_param_path": NAMED + ": the bytes of the file",
}


def model_name() -> str:
    """What people call the model."""
    model = str(resolution_result(get_server_args(), "model_path"))
    return Path(model).name or model


def kv_heads() -> int:
    """KV heads of the whole model; 0 if its configuration does not say it."""
    return int(getattr(process_model_config(), "num_key_value_heads", 0) or 0)


def engine_fields(options: SGLangOptions) -> dict[str, object]:
    """The fields by name. May read all files of the model, for minutes, and logs progress.

    Raises UnnamedWeights if nothing says which weights these are.
    """
    server, model = get_server_args(), process_model_config()
    cache = options.weights_cache
    config = without(model.hf_config.to_dict())
    config.pop("context_len", None)  # SGLang's own: see _lengths
    fields: dict[str, object] = {
        "engine": "sglang",
        "sglang": __version__,
        "model_dtype": str(model.dtype),
        **_settings(server),
        **_environment(),
        **flat_fields("hf", config),
        **_lengths(config, model),
    }
    path, revision = str(model.model_path), getattr(model, "revision", None)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if options.weights_name() is None:
        _check_weights_are_of_files(server)
    fields["weights"] = options.weights_name() or _as_loaded(path, revision, commit, cache)
    draft = resolution_result(server, "speculative_draft_model_path")
    if draft and str(draft) != path:  # its keys and values lie in the pages too
        draft_revision = resolution_result(server, "speculative_draft_model_revision")
        fields["draft"] = options.weights_name() or _as_loaded(str(draft), draft_revision, None, cache)
    for adapter in resolution_result(server, "lora_paths") or ():
        folder = str(getattr(adapter, "lora_path", ""))
        fields[f"adapter.{getattr(adapter, 'lora_name', '')}"] = _as_loaded(folder, None, None, cache)
    if found := resolution_result(server, "quantization_param_path"):
        fields["kv_scales"] = hashlib.sha256(Path(str(found)).read_bytes()).hexdigest()
    return fields


def _check_weights_are_of_files(server: Any) -> None:
    for name, value in WEIGHTS_OF_OTHERS.items():
        if resolution_result(server, name) == value:
            option = name.replace("_", "-")
            raise UnnamedWeights(f"with {option} {value} the weights are those of another process: set weights_version")


@functools.cache
def _as_loaded(model: str, revision: str | None, commit: str | None, cache: Path | None) -> str:
    """The identity of weights as this process has loaded them, also for a storage that is attached again. Raises
    UnnamedWeights where the first one is attached to a running engine, and files are others than at its start. (Weights
    that were changed in place have terms of their own.)"""
    if resolution_result(get_server_args(), "hicache_storage_backend") is None and not weight_changes():
        started = psutil.Process().create_time()
        if (changed := changed_since(model, started)) is not None:
            raise UnnamedWeights(f"{changed} was changed after this engine started: restart it, or set weights_version")
    return weights_identity(model, revision, commit, cache)


def weight_changes() -> int:
    """How often SGLang has noted that the weights of this process were changed in place."""
    return sum(source in WEIGHT_CHANGES for source, _ in get_context().overrides_log())


def check_supported() -> None:
    """Raises ConfigError for what is not supported, by the name of the setting that asks for it."""
    server = get_server_args()
    for name, what in (("attn_cp_size", "context parallelism"), ("dcp_size", "decode context parallelism")):
        if int(resolution_result(server, name) or 1) > 1:
            raise ConfigError(f"{name.replace('_', '-')}: {what} is not supported: each rank holds parts of tokens")
    if resolution_result(server, "disaggregation_decode_enable_offload_kvcache"):
        raise ConfigError(
            "disaggregation-decode-enable-offload-kvcache is not supported: SGLang does not say there where in its "
            "prompt a page is"
        )


def model_source() -> ModelSource:
    """The model, for pages that engines of other kinds read. Raises UnsupportedLayout for a setting that changes K and
    V and is no part of the model's files."""
    server, model = get_server_args(), process_model_config()
    for name in CHANGES_PAGES:
        found = resolution_result(server, name)
        if found not in CHANGES_PAGES[name]:
            raise UnsupportedLayout(f"share 'engines' is not supported with --{name.replace('_', '-')} {found!r:.100}")
    for name, value in _environment().items():
        raise UnsupportedLayout(f"share 'engines' is not supported with {name.removeprefix('env.')}={value}")
    return ModelSource(
        str(model.model_path),
        str(model.dtype).removeprefix("torch."),
        kv_heads(),
        getattr(model, "revision", None),
        getattr(model.hf_config, "_commit_hash", None),
    )


def _settings(server: Any) -> dict[str, object]:
    defaults = {field.name: field for field in msgspec.structs.fields(type(server))}
    found: dict[str, object] = {}
    for name, section in namespace_of(type(server)).items():
        is_left_out = name in LEFT_OUT or (_is_left_out(section) and name not in NAMED_ALL_THE_SAME)
        if is_left_out or name.startswith("_"):
            continue
        text = text_of(resolution_result(server, name))
        if text != text_of(_default(defaults[name])):
            found[f"{section}.{name}"] = text
    return found


def _environment() -> dict[str, object]:
    return {
        f"env.{name}": value
        for name, value in os.environ.items()
        if re.fullmatch(ENVIRONMENT_NAMED, name) and not re.fullmatch(ENVIRONMENT_OF_KUBERNETES, name)
    }


def _is_left_out(section: str) -> bool:
    return any(section == left or section.startswith(left + ".") for left in SECTIONS_LEFT_OUT)


def _default(field: Any) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return None if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _lengths(config: Mapping[str, object], model: Any) -> dict[str, object]:
    """The length of the context, for a model whose angles may depend on it."""
    for part in parts_of(config):
        kind = part.get("rope_type", part.get("type")) if "rope_theta" in part or "factor" in part else None
        if kind is not None and kind not in PLAIN_ROPES:
            return {"context_length": int(model.context_len)}
    return {}
