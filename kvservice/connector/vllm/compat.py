"""Everything that depends on how vLLM is built inside: the model's identity, hash settings, KV cache groups.

Written for vLLM 0.32 and 0.33. Adapt this file first for another version; `make vllm-versions` says what it changes.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, MLAAttentionSpec, group_kernel_blocks
from vllm.v1.request import RequestStatus

from kvservice.connector.cache_groups import Grouping, OneGroup, SeveralGroups
from kvservice.connector.config_text import text_of
from kvservice.connector.cpu_packing import cpu_packing
from kvservice.connector.options import ConnectorOptions, CopierChoice, Layerwise, Offload, slot_parts
from kvservice.connector.vllm.draft_layers import DRAFT_LAYERS, has_draft_layers, keep_kv
from kvservice.connector.vllm.group_rules import (
    Spec,
    StoredGroup,
    StoredGroups,
    content_bytes,
    group_count,
    stored_groups,
)
from kvservice.connector.vllm.identity import config_fields, model_fields
from kvservice.connector.vllm.shapes import refuse_shape
from kvservice.connector.weights import weights_identity
from kvservice.connector.worker.block_copier import BlockCopier, GroupedBlockCopiers
from kvservice.connector.worker.devices import check_device
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.numbers import number_fields
from kvservice.core.block.window_groups import WindowGroup
from kvservice.core.messages import EngineSpec
from kvservice.core.segment.layout import HeadShare, SlotLayout
from kvservice.errors import ConfigError, RandomHashSeed, UnnamedWeights, UnsupportedLayout

log = logging.getLogger("kvservice.connector")

# A signpost is copied from host memory on GPUs, too, so it must stay shorter than what is copied in batches there.
SIGNPOST_BYTES = 64


def check(vllm_config: Any, cache_config: KVCacheConfig) -> StoredGroups:
    """What is stored of this engine. Raises UnsupportedDevice, UnsupportedLayout or RandomHashSeed that says what to
    change."""
    check_device(vllm_config.device_config.device_type)
    found = supported(vllm_config, cache_config)
    hash_fields(vllm_config)
    return found


def engine_spec(vllm_config: Any, cache_config: KVCacheConfig, options: ConnectorOptions) -> EngineSpec:
    """The engine's identity towards the pool, but for its id.

    May read all files of the model, which takes minutes. Raises as `check` does, UnnamedWeights, and ConfigError for
    slots or an accept_codec that this engine cannot have.
    """
    found = check(vllm_config, cache_config)
    layout = layout_of(vllm_config, cache_config, found, found.groups[0])
    if options.slot_tokens is not None:
        if (count := group_count(cache_config)) > 1:
            raise ConfigError(f"slot_tokens needs a model with one KV cache group, and this one has {count}")
        parts = slot_parts(options.slot_tokens, layout.block_tokens)
        layout = replace(layout, block_tokens=options.slot_tokens, parts=parts)
    window_groups = tuple(
        WindowGroup(layout_of(vllm_config, cache_config, found, group), group.window)
        for group in found.groups[1:]
        if group.window is not None
    )
    model = vllm_config.model_config
    names = model.served_model_name
    name = names[0] if isinstance(names, list) else names
    spec = found.full
    fields: dict[str, object] = {
        "engine": f"vllm {vllm.__version__}",
        "weights": options.weights_name() or weights_of(model, options.weights_cache),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(spec.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "layers": layout.layer_count,
        "kv_heads": layout.kv_head_count,
        "cell_bytes": layout.cell_bytes,
        "cell_format": _cell_format(vllm_config),
        "block_tokens": _hash_tokens(cache_config, found),
        "slot_tokens": layout.block_tokens,
        **_number_fields(vllm_config, cache_config, spec, layout, options.accept_codec),
        **_packing_fields(vllm_config, cache_config, spec),
        **_group_fields(vllm_config, cache_config, found, window_groups),
        **_draft_fields(vllm_config, options),
        **hash_fields(vllm_config),
        **config_fields(vllm_config),
    }
    called = Path(str(name)).name or str(name)
    fingerprint = Fingerprint.of(fields).within(options.namespace)
    return EngineSpec(bytes(16), called, fingerprint, layout, options.namespace, window_groups)


def supported(vllm_config: Any, cache_config: KVCacheConfig) -> StoredGroups:
    """What is stored of this engine. Raises UnsupportedLayout that names the KV cache group or the setting."""
    refuse_shape(vllm_config)
    parallel = vllm_config.parallel_config
    found = stored_groups(cache_config)
    if found.has_states and vllm_config.speculative_config is not None:
        raise UnsupportedLayout(
            "speculative decoding with states (Mamba, linear attention) is not supported: drafts that are refused move "
            "their blocks"
        )
    if found.has_states and parallel.tensor_parallel_size > 1:
        raise UnsupportedLayout(
            "states (Mamba, linear attention) over several tensor-parallel ranks are not supported: each rank has a "
            "part of its own shape; start the engine with one rank"
        )
    if has_draft_layers(vllm_config.speculative_config) and (count := group_count(cache_config)) > 1:
        raise UnsupportedLayout(
            f"draft layers (EAGLE, MTP) beside {count} KV cache groups are not supported; use a draft model or "
            "n-grams, or leave speculative_config out"
        )
    hash_block = cache_config.hash_block_size
    if hash_block is not None and (
        found.block_tokens % hash_block or (len(found.groups) == 1 and hash_block != found.block_tokens)
    ):
        raise UnsupportedLayout(f"hash block size {hash_block} differs from the block size {found.block_tokens}")
    heads = {int(group.spec.num_heads) for group in found.groups}
    if len(heads) > 1 and parallel.tensor_parallel_size > 1:
        raise UnsupportedLayout(
            f"KV cache groups with different numbers of heads ({sorted(heads)}) are not supported with tensor "
            "parallelism"
        )
    return found


def layout_of(vllm_config: Any, cache_config: KVCacheConfig, found: StoredGroups, group: StoredGroup) -> SlotLayout:
    """The layout of one position of a group: all layers of its engine groups, in their order."""
    if not group.engine_groups:
        return SlotLayout(1, 1, SIGNPOST_BYTES, found.block_tokens)
    spec = group.spec
    heads = int(spec.num_heads)
    return SlotLayout(
        layer_count=sum(len(cache_config.kv_cache_groups[index].layer_names) for index in group.engine_groups),
        kv_head_count=heads * _shard_count(vllm_config, spec),
        cell_bytes=content_bytes(spec) // heads,
        block_tokens=found.block_tokens,
        parts=found.parts(group),
    )


def grouping(vllm_config: Any, cache_config: KVCacheConfig, spec: EngineSpec) -> Grouping:
    """How the scheduler half finds the engine's blocks and hashes of a position."""
    found = supported(vllm_config, cache_config)
    if group_count(cache_config) == 1:
        return OneGroup(spec.layout.parts)
    stride = found.block_tokens // _hash_tokens(cache_config, found)
    signposts = len(cache_config.kv_cache_groups) if found.has_signposts else None
    return SeveralGroups(found.engine_groups(), spec.window_groups, found.block_tokens, stride, signposts)


def _hash_tokens(cache_config: KVCacheConfig, found: StoredGroups) -> int:
    """Tokens of one of vLLM's hashes."""
    return cache_config.hash_block_size or math.gcd(*(int(group.spec.block_size) for group in found.groups))


def rank_share(vllm_config: Any, cache_config: KVCacheConfig) -> HeadShare:
    """The kv heads of the model that this worker's tensor-parallel rank holds, and the ranks it shares them with."""
    found = supported(vllm_config, cache_config)
    return _share(vllm_config, cache_config, found, found.groups[0])


def _share(vllm_config: Any, cache_config: KVCacheConfig, found: StoredGroups, group: StoredGroup) -> HeadShare:
    parallel = vllm_config.parallel_config
    layout = layout_of(vllm_config, cache_config, found, group)
    ranks = int(parallel.tensor_parallel_size)
    return layout.share(int(parallel.rank) % ranks, ranks, _shard_count(vllm_config, group.spec))


def grouped_block_copiers(
    vllm_config: Any, cache_config: KVCacheConfig, tensors: Mapping[str, torch.Tensor]
) -> GroupedBlockCopiers:
    """The block copiers of a model with several KV cache groups, that of signposts behind the others."""
    found = supported(vllm_config, cache_config)
    block_copiers: dict[int, tuple[BlockCopier, SlotLayout]] = {}
    for group in found.groups:
        layout = layout_of(vllm_config, cache_config, found, group)
        heads = _share(vllm_config, cache_config, found, group).heads
        first = 0
        for index in group.engine_groups:
            layers = ordered_layers(vllm_config, cache_config, tensors, index)
            block_copiers[index] = (
                BlockCopier(
                    layers,
                    heads,
                    first_layer=first,
                    layers_behind=layout.layer_count - first - len(layers),
                ),
                layout,
            )
            first += len(layers)
    ordered = [block_copiers[index] for index in sorted(block_copiers)]
    if found.has_signposts:
        layout = layout_of(vllm_config, cache_config, found, found.groups[0])
        zeros = torch.zeros(1, 1, 1, SIGNPOST_BYTES, dtype=torch.uint8)
        ordered.append((BlockCopier([zeros], range(1)), layout))
    return GroupedBlockCopiers(ordered)


def ordered_layers(
    vllm_config: Any, cache_config: KVCacheConfig, tensors: Mapping[str, torch.Tensor], engine_group: int = 0
) -> Sequence[torch.Tensor]:
    """KV tensors in the order of the engine group, which is the order of layers in a slot. Each is `[block, ...]`, as
    vLLM allocated it."""
    found = [tensors[name] for name in cache_config.kv_cache_groups[engine_group].layer_names]
    rows = found[0].shape[0]
    if rows != cache_config.num_blocks:
        where = f"{cache_config.num_blocks} blocks in {rows} kernel blocks"
        if vllm_config.device_config.device_type == "cpu":
            # The CPU kernels keep K and V apart within a kernel block, so its size would be part of the format.
            raise UnsupportedLayout(f"{where} are not supported on CPU; use a --block-size of 32 or 128")
        if _is_packed(cache_config.kv_cache_groups[engine_group].kv_cache_spec):
            raise UnsupportedLayout(
                f"{where} are not supported for a KV format that spans tokens; use a smaller --block-size"
            )
    return [group_kernel_blocks(tensor, cache_config.num_blocks) for tensor in found]


def token_of_elements(
    vllm_config: Any, cache_config: KVCacheConfig, layers: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """For BlockCopier, of `ordered_layers`: the token that each element of a head's part of a block is of. None where
    the elements of a token lie together, as everywhere but in the kernels of CPUs."""
    spec = cache_config.kv_cache_groups[0].kv_cache_spec
    if vllm_config.device_config.device_type != "cpu" or isinstance(spec, MLAAttentionSpec):
        return None
    from kvservice.connector.vllm import cpu_cells  # vLLM has its kernels for CPUs only there

    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return cpu_cells.token_of_elements(layers[0], spec, vllm_config.model_config.dtype, cache_dtype)


def layerwise_for(vllm_config: Any, options: ConnectorOptions, group_count: int) -> Layerwise:
    """The part of the option that this engine can do. The rest is copied as whole blocks, which is logged."""
    wanted = options.layerwise
    if wanted is Layerwise.OFF:
        return wanted
    if options.copier is CopierChoice.WORKER:
        log.warning("layerwise %r is not used, because a copy worker copies whole blocks", wanted.value)
        return Layerwise.OFF
    if group_count > 1:
        log.warning("layerwise %r is not used, because the model has %d KV cache groups", wanted.value, group_count)
        return Layerwise.OFF
    if vllm_config.speculative_config is not None:
        log.warning(
            "layerwise %r is not used, because a draft model's layers are written after the forward", wanted.value
        )
        return Layerwise.OFF
    if wanted.loads and vllm_config.scheduler_config.async_scheduling:
        # The next step would already compute on blocks that the last check of this one may refuse.
        log.warning(
            "blocks are loaded whole, not layer by layer, because of vLLM's asynchronous scheduling (use "
            "--no-async-scheduling)"
        )
        return Layerwise.SAVE if wanted.saves else Layerwise.OFF
    return wanted


def hash_fields(vllm_config: Any) -> dict[str, object]:
    """How the engine names blocks. Raises RandomHashSeed if another process would name them differently."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if algorithm.startswith("xxhash") and seed is None:
        raise RandomHashSeed(
            f"prefix caching hash {algorithm!r} is seeded at random in every process, so no two replicas would ever "
            "share a block; start vLLM with --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to the same "
            "number for all replicas"
        )
    fields: dict[str, object] = {"hash": algorithm, "hash_seed": seed if seed is not None else get_none_hash_seed()}
    if not algorithm.endswith("_cbor"):
        # These hash a pickle, whose bytes depend on the Python version.
        fields["hash_python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return fields


def _shard_count(vllm_config: Any, spec: Spec) -> int:
    """The number of different parts that the tensor-parallel ranks hold. Further ranks hold copies."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if ranks == 1 or isinstance(spec, MambaSpec):
        return 1
    if spec.max_tp_shards is not None:  # a latent (MLA) is not divided
        return min(ranks, int(spec.max_tp_shards))
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    shards = min(ranks, total)
    if shards * int(spec.num_kv_heads) != total:
        raise UnsupportedLayout(
            f"{total} kv heads over {ranks} tensor-parallel ranks with {spec.num_kv_heads} each are not supported: "
            "use a degree that divides the heads, or a multiple of them"
        )
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and int(draft.get_total_num_kv_heads()) != total:
        raise UnsupportedLayout(
            f"a draft of {draft.get_total_num_kv_heads()} kv heads beside a model of {total} is not supported over "
            "several tensor-parallel ranks: they hold other parts of it"
        )
    return shards


def _is_packed(spec: Any) -> bool:
    """Whether a cell is something other than K‖V of one head and token, or a latent. Only the attention backend knows
    what such a cell holds."""
    if isinstance(spec, MLAAttentionSpec) and spec.cache_dtype_str == "fp8_ds_mla":
        return False  # 656 bytes a token, scales among them
    return spec.num_head_slots is not None or spec.state_content_bytes is not None


def _packing_fields(vllm_config: Any, cache_config: KVCacheConfig, spec: Spec) -> dict[str, object]:
    """What else the bytes depend on. FlashInfer's NVFP4, for example, puts all K heads of a rank before its V heads, so
    the same number of equal cells has another order at each degree."""
    fields: dict[str, object] = {}
    if isinstance(spec, MLAAttentionSpec):
        fields["latent"] = f"{spec.head_size} {spec.cache_dtype_str}"
    if _is_packed(spec):
        fields["packing"] = (
            f"{spec.kv_quant_mode.name} {cache_config.kv_cache_layout} {_shard_count(vllm_config, spec)} shards"
        )
    return fields


def _number_fields(
    vllm_config: Any, cache_config: KVCacheConfig, spec: Spec, layout: SlotLayout, accepted: str
) -> dict[str, object]:
    """Rows are known where a cell is `[token][K‖V]`. On a CPU the attention backend orders its bytes for itself."""
    head = int(spec.head_size)
    has_rows = (
        group_count(cache_config) == 1
        and not isinstance(spec, MLAAttentionSpec)
        and not _is_packed(spec)
        and int(getattr(spec, "head_size_v", head)) == head
        and vllm_config.device_config.device_type != "cpu"
    )
    tokens, odd = divmod(layout.cell_bytes, 2 * head * spec.dtype.itemsize) if has_rows else (0, 0)
    row = head if tokens and not odd else 0
    if accepted and not row:
        raise ConfigError(
            "accept_codec: the bytes of this engine's blocks are not rows of K and V, as on a CPU, with several KV "
            "cache groups or with latent attention: leave it out",
            key="accept_codec",
        )
    return number_fields(str(spec.dtype), row, tokens if row else 0, accepted)


def _group_fields(
    vllm_config: Any, cache_config: KVCacheConfig, found: StoredGroups, window_groups: Sequence[WindowGroup]
) -> dict[str, object]:
    """Only with several groups: how many layers each engine group has, in the order of the slots."""
    if group_count(cache_config) == 1:
        return {}
    fields: dict[str, object] = {}
    for number, stored in enumerate(found.groups):
        layers = [len(cache_config.kv_cache_groups[index].layer_names) for index in stored.engine_groups]
        fields[f"group_{number}"] = f"layers {layers} {_block_text(vllm_config, cache_config, stored.spec)}"
    for number, group in enumerate(window_groups, 1):
        fields[f"window_{number}"] = _window_text(group)
    return fields


def _block_text(vllm_config: Any, cache_config: KVCacheConfig, spec: Spec) -> str:
    if isinstance(spec, MambaSpec):  # how its parts lie is in env.VLLM_SSM_CONV_STATE_LAYOUT
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        shapes = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in parts)
        return f"block {spec.block_size} state {spec.mamba_type.name} {shapes}"
    return f"block {spec.block_size} {spec.dtype} {_packing_fields(vllm_config, cache_config, spec)}"


def _window_text(group: WindowGroup) -> str:
    """The numbers themselves. The text of our classes would put their names and fields into the names of blocks."""
    window, layout = group.window, group.layout
    kind = "state" if window.is_state else f"sliding {window.sliding_tokens} chunk {window.chunk_tokens}"
    return (
        f"{kind} layers {layout.layer_count} "
        f"heads {layout.kv_head_count} cell {layout.cell_bytes} block {layout.block_tokens} parts {layout.parts}"
    )


def _draft_fields(vllm_config: Any, options: ConnectorOptions) -> dict[str, object]:
    """Of a draft model or draft layers, which keep their KV in the same blocks."""
    speculative = vllm_config.speculative_config
    if not keep_kv(speculative):
        return {}
    fields: dict[str, object] = {DRAFT_LAYERS: speculative.method} if has_draft_layers(speculative) else {}
    draft = speculative.draft_model_config
    is_named = draft.model == vllm_config.model_config.model  # MTP is of the model's own files
    fields["draft"] = (options.weights_name() if is_named else "") or weights_of(draft, options.weights_cache)
    for name in ("quantization", "kv_cache_dtype", "attention_backend", "moe_backend"):
        fields[f"draft.{name}"] = text_of(getattr(speculative, name, None))
    return fields | model_fields(draft, "draft")


def weights_of(model_config: Any, cache: Path | None) -> str:
    """What all bytes of the weights are called. May read them, which takes minutes. Raises UnnamedWeights."""
    if getattr(model_config, "model_weights", ""):
        raise UnnamedWeights(
            f"the weights come from {model_config.model_weights}, whose bytes are not read here; name them yourself "
            'with "weights_version" in kv_connector_extra_config'
        )
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return weights_identity(str(model_config.model), model_config.revision, commit, cache)


def _cell_format(vllm_config: Any) -> str:
    """How K and V lie within one head's cell. The attention backend chooses it, on CPU together with the instruction
    set."""
    backend = getattr(vllm_config.attention_config, "backend", None)
    if vllm_config.device_config.device_type == "cpu":
        return f"{backend or 'cpu'} {cpu_packing()}"
    # If none is chosen, vLLM takes a backend by the kind of device.
    return str(backend or f"default {current_platform.get_device_name()}")


def names_media(vllm_config: Any) -> bool:
    """Whether vLLM names images and the like by their content. With both of its caches off it numbers them from 1 in
    every process, and the numbers enter the names of blocks."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    has_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
    return multimodal is None or has_prefixes or multimodal.mm_processor_cache_gb > 0


def keeps_hashed_blocks_true(vllm_config: Any) -> bool:
    """Whether a block that vLLM's prefix cache names holds what the name says once the planned steps have run. By
    priority, a request may be preempted in the step that gave it blocks; they keep the names of what was never
    computed."""
    return bool(vllm_config.scheduler_config.policy == "fcfs")


def keeps_session_true(vllm_config: Any, request: Any) -> bool:
    """Whether what vLLM counts as computed of a session is that. Where a part of a session of streaming input ends
    among accepted drafts, the rest of them counts as computed for the tokens of the next part."""
    return vllm_config.speculative_config is None or not request.resumable


def is_session_end(request: Any) -> bool:
    """Whether it is a session of streaming input that ended. vLLM aborts one that waits for more, and one in the middle
    of something."""
    return bool(request.resumable) and request.status is RequestStatus.FINISHED_ABORTED


def check_offload(vllm_config: Any, options: ConnectorOptions, group_count: int) -> None:
    """Raises ConfigError if blocks near eviction cannot be found or believed."""
    if options.offload is not Offload.EVICTING:
        return
    needs = (
        (bool(vllm_config.cache_config.enable_prefix_caching), "vLLM's prefix caching, which is off"),
        (keeps_hashed_blocks_true(vllm_config), "vLLM's scheduling policy 'fcfs'"),
        (group_count == 1, f"a model with one KV cache group, and this one has {group_count}"),
        (not has_draft_layers(vllm_config.speculative_config), "speculative decoding without EAGLE or MTP"),
    )
    for holds, need in needs:
        if not holds:
            raise ConfigError(f"offload 'evicting' needs {need}; choose 'lazy' or 'eager'")


def check_tails(vllm_config: Any, cache_config: KVCacheConfig, options: ConnectorOptions) -> None:
    """Raises ConfigError if a block cannot be used as far as it is computed."""
    groups = cache_config.kv_cache_groups
    if options.tails and has_draft_layers(vllm_config.speculative_config):
        raise ConfigError("tails needs an engine without EAGLE or MTP, which read one token ahead: leave it out")
    if options.tails and (count := group_count(cache_config)) > 1:
        raise ConfigError(f"tails needs a model with one KV cache group, and this one has {count}: leave it out")
    if options.tails and groups and _is_packed(groups[0].kv_cache_spec):
        raise ConfigError("tails needs a KV format in which each token has bytes of its own: leave it out")


_ONE_PROCESS = ("uni", "external_launcher")  # executors whose worker runs beside its scheduler


def prefer_recompute(vllm_config: Any) -> None:
    """Set vLLM's load failure policy to recompute. Its default fails a request whose load fails.

    Under a MultiConnector its own policy counts. A worker sees that, and in one process is made before the scheduler.
    """
    outer = get_current_vllm_config_or_none()
    for config in (vllm_config, outer):
        transfer = None if config is None else config.kv_transfer_config
        if transfer is None or transfer.kv_load_failure_policy == "recompute":
            continue
        transfer.kv_load_failure_policy = "recompute"
        if config is not vllm_config and config.parallel_config.distributed_executor_backend not in _ONE_PROCESS:
            log.warning(
                "a failed load fails its request, because the scheduler is in another process: set "
                "kv_load_failure_policy of %s to 'recompute'",
                transfer.kv_connector,
            )
            continue
        log.info("kv_load_failure_policy is set to 'recompute': a failed load costs time, not the request")
