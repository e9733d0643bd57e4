"""The model in a Hugging Face checkpoint, read from `config.json` without torch or transformers.

Positions are served as RoPE without scaling, or as YaRN (Peng et al. 2023,
https://arxiv.org/abs/2309.00071). `config.json` has `rope_theta` and `rope_scaling`; transformers 5
writes both into `rope_parameters`. In older files, the kind of scaling is the field `type`.
"""

import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.config import Config
from penstock.protocol.decoding import decode_any, explain
from penstock.protocol.quantization import FIELD, WeightFormat, read_format

_QUANTIZED_NAME = re.compile(
    r"(Qwen3-[\w.-]*?)-(?:AWQ|GPTQ|GGUF|MLX|Int[48]|W\dA\d|[48]-?bit)", re.I
)


def architecture_hint(architectures: Iterable[str]) -> str:
    """Return the purpose of an unsupported model, to be appended to a message; empty if unknown.

    architectures: `architectures` and `model_type` of `config.json`.
    """
    names = " ".join(architectures)
    if re.search(r"qwen4", names, re.I):
        return (
            "; Qwen4, which has sparse attention, is not served yet: give an older one, such as "
            "Qwen/Qwen3.8-27B"
        )
    if re.search(r"Classification|Reward|Guard|Qwen3\w*Model\b", names):
        return "; a classifier, or an embedding model without modules.json, is not served"
    if "ForConditionalGeneration" in names:
        return (
            "; a model of images or audio is not supported: give one of text, such as Qwen/Qwen3-8B"
        )
    if re.search(r"qwen2|qwen\b|QWenLM", names, re.I):
        return "; Qwen2.5 and older ones are not served: give one of Qwen3, such as Qwen/Qwen3-8B"
    return ""


def served_instead(folder: Path) -> str:
    """Return the advice for a checkpoint whose weight format is not served."""
    if found := _QUANTIZED_NAME.search(str(folder)):
        return f"give Qwen/{found[1]}-FP8, or Qwen/{found[1]} with --quantization fp8"
    return "give the model's FP8 checkpoint, or the 16-bit one with --quantization fp8"


def without_config(name: str, files: Collection[str]) -> str:
    """Return the reason why a file or folder `name` without a `config.json` is not served."""
    if name.lower().endswith(".gguf"):
        return f"{name}: got a GGUF file, which `launch all --model` converts, expected a folder"
    if found := sorted(file for file in files if file.lower().endswith(".gguf")):
        return (
            f"{name}: got GGUF files, expected config.json and safetensors; give the path of one "
            f"file on this machine, such as {found[0]}"
        )
    if "adapter_config.json" in files:
        return f"{name}: got a LoRA adapter, expected a model; merge both with `merge_and_unload`"
    return f"{name} has no config.json; a checkpoint needs it"


DEFAULT_BASE = 10_000.0  # default of transformers
SERVED_TYPES = ("default", "yarn")
# YaRN divides by the base's logarithm; a larger base makes frequencies too small for float32
MIN_BASE, MAX_BASE = 2.0, 1e30
MAX_POSITIONS = 1 << 24
Fields = dict[str, tuple[str, Any]]  # name → path in `config.json`, and value


class Yarn(NamedTuple):
    """Parameters of YaRN, which extends the context beyond the length of the training."""

    factor: float  # divisor of low frequencies
    original_positions: int  # context length of the training
    beta_fast: float  # frequencies with more turns in `original_positions` are kept
    beta_slow: float  # frequencies with fewer turns are divided by `factor`
    truncate: bool  # True if the bounds of the ramp between both are whole numbers
    attention_factor: float  # factor of cosines and sines


class Rope(NamedTuple):
    """Rotary position embedding."""

    base: float
    yarn: Yarn | None
    num_positions: int  # longest context
    share: float = 1.0  # leading part of each head that is rotated


def read_rope(config: "ModelConfig") -> Rope:
    """Read the fields of `config.json` about RoPE. Raises ValueError for an unsupported kind.

    `rope_scaling` wins over `rope_parameters`.
    """
    num_positions, scaling = config.max_position_embeddings, config.rope_scaling or {}
    given = {"rope_parameters": _flat(config.rope_parameters or {}), "rope_scaling": scaling}
    fields = {
        name: (f"{parent}.{name}", value)
        for parent, values in given.items()
        for name, value in values.items()
    }
    kinds = dict(_type(parent, values) for parent, values in given.items())
    kinds.pop("default", None)
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds.values())}: got {sorted(kinds)}, expected one")
    kind, path = kinds.popitem() if kinds else ("default", "")
    if kind not in SERVED_TYPES:
        raise ValueError(f"{path}: got {kind!r}, expected {' or '.join(map(repr, SERVED_TYPES))}")
    share = config.partial_rotary_factor if config.is_hybrid else 1.0
    part = _number(fields, "partial_rotary_factor", share)
    if part > 1 or (share == 1 and part != share):
        raise ValueError(f"{fields['partial_rotary_factor'][0]}: got {part}, expected 1")
    fields.setdefault("rope_theta", ("rope_theta", config.rope_theta))
    base = _within(fields, "rope_theta", DEFAULT_BASE, MIN_BASE, MAX_BASE)
    if kind == "default":
        return Rope(base, None, num_positions, part)
    fields.setdefault("factor", (f"{path.partition('.')[0]}.factor", None))
    yarn = _yarn(fields, num_positions, config.original_max_position_embeddings)
    return Rope(base, yarn, int(yarn.original_positions * yarn.factor), part)


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of `full_attention`, the only layer type that is served.

    transformers 5 may write parameters for each layer type.
    """
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def _type(parent: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Return the type of RoPE, and the path of the type's field."""
    name = "rope_type" if fields.get("rope_type") else "type"
    return str(fields.get(name) or "default"), f"{parent}.{name}"


def _yarn(fields: Fields, num_positions: int, original_positions: int | None) -> Yarn:
    """Read YaRN's fields as transformers does."""
    name = "original_max_position_embeddings"
    if original_positions is not None:
        fields[name] = name, original_positions
    original = int(_within(fields, name, num_positions, 1, MAX_POSITIONS))
    path, given = fields["factor"]
    if given is None and original != num_positions:
        fields["factor"] = path, num_positions / original
    elif given is None:
        raise ValueError(f"{path}: got null, expected 1 or more")
    factor = _within(fields, "factor", 0.0, 1, MAX_POSITIONS / original)
    m_scale, m_scale_all = (_number(fields, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    both = m_scale and m_scale_all
    factors = (m_scale, m_scale_all) if both else (1.0, 0.0)
    wide, narrow = (0.1 * scale * math.log(factor) + 1.0 for scale in factors)
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        truncate=bool(fields.get("truncate", ("", True))[1]),
        attention_factor=_number(fields, "attention_factor", wide / narrow),
    )


def _within(fields: Fields, name: str, default: float, least: float, most: float) -> float:
    """Return a number from `least` to `most`. Raises ValueError for another number, and for 0."""
    path, value = fields.get(name, (name, None))
    expected = f"{least:g} to {most:g}"
    number = _number(fields, name, default, f"a number of {expected}")
    if value == 0 or not least <= number <= most:
        raise ValueError(f"{path}: got {value}, expected {expected}")
    return number


def _number(
    fields: Fields, name: str, default: float, expected: str = "a number of at least 0"
) -> float:
    path, value = fields.get(name, (name, None))
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{path}: got {value!r}, expected {expected}")
    return float(value) or default


T = TypeVar("T")
DType = Literal["auto", "bfloat16", "float16", "float32"]
MIN_REQUEST_BYTES = 1 << 20
# bytes of a token in a JSON prompt: a token id takes at most 8, text seldom more, even if escaped
REQUEST_BYTES_PER_TOKEN = 16
ARCHITECTURE = "Qwen3ForCausalLM"
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
EMBEDDING_ARCHITECTURE = "Qwen3Model"  # checkpoint that was saved without an output layer
# Qwen3.5, 3.6 and 3.8, and Qwen3-Next; ForConditionalGeneration has a vision part, which is not
# read
NEXT_ARCHITECTURE = "Qwen3NextForCausalLM"
HYBRID_MOE_ARCHITECTURES = [
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    NEXT_ARCHITECTURE,
]
HYBRID_ARCHITECTURES = [
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    *HYBRID_MOE_ARCHITECTURES,
]
# models/architecture.py describes each of them
SERVED = [ARCHITECTURE, MOE_ARCHITECTURE, *HYBRID_ARCHITECTURES]
# defaults of transformers' configurations that differ from those of Qwen3
HYBRID_DEFAULTS = {"head_dim": 256, "moe_intermediate_size": 512, "norm_topk_prob": True}
FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"  # in `layer_types`
Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Experts = Annotated[int, Meta(ge=0, le=1 << 16)]


class ModelError(Exception):
    """A checkpoint that can't be served, and the reason."""


class ModelConfig(Struct, kw_only=True, frozen=True):
    """The fields of `config.json` that the pipeline uses, under the same names."""

    architectures: list[str]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    max_position_embeddings: Size
    head_dim: Annotated[Size, Meta(multiple_of=2)] = 128
    rms_norm_eps: Annotated[float, Meta(ge=1e-30, le=1)] = 1e-6
    rope_theta: float | None = None
    # place of `rope_theta` and `rope_scaling` in files of transformers 5
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    dual_chunk_attention_config: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    torch_dtype: DType = "auto"
    # transformers 5's name of `torch_dtype`; weights are converted to `--dtype`
    dtype: DType = "auto"
    attention_bias: bool = False
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    # True if the model returns vectors instead of text; read from files other than config.json
    is_embedding_model: bool = False
    # fields of Qwen3MoeForCausalLM
    num_experts: Experts = 128
    num_local_experts: Experts | None = None  # transformers 5's name of `num_experts`
    num_experts_per_tok: Experts = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Annotated[int, Meta(ge=1)] = 1
    mlp_only_layers: list[int] | None = None
    # fields of HYBRID_ARCHITECTURES
    full_attention_interval: Size = 4  # without `layer_types`, each such layer has full attention
    partial_rotary_factor: float = 0.25  # unless `rope_parameters` has it
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Annotated[int, Meta(ge=2, le=64)] = 4
    attn_output_gate: bool = True
    output_gate_type: str = "swish"
    shared_expert_intermediate_size: Size = 512
    mtp_use_dedicated_embeddings: bool = False
    # True if the layer of multi-token prediction is read, which makes drafts; an option decides
    reads_mtp: bool = False

    @property
    def is_hybrid(self) -> bool:
        """Return True if some layers have linear attention, and recurrent state."""
        return not set(HYBRID_ARCHITECTURES).isdisjoint(self.architectures)

    @property
    def is_multimodal(self) -> bool:
        """Return True if the checkpoint has other parts beside that of text."""
        return any(name.endswith("ForConditionalGeneration") for name in self.architectures)

    @property
    def kinds_of_layers(self) -> list[str]:
        """Return `layer_types`, or the types that follow from `full_attention_interval`."""
        if self.layer_types is not None or not self.is_hybrid:
            return self.layer_types or [FULL_ATTENTION] * self.num_hidden_layers
        return [
            LINEAR_ATTENTION if (index + 1) % self.full_attention_interval else FULL_ATTENTION
            for index in range(self.num_hidden_layers)
        ]

    @property
    def interleaves_keys(self) -> bool:
        """Return True if linear attention has joined input projections, ordered by key head."""
        return NEXT_ARCHITECTURE in self.architectures

    def is_sparse(self, index: int) -> bool:
        """Return True if a layer has experts."""
        is_dense = not self.expert_count or (index + 1) % self.decoder_sparse_step
        return not is_dense and index not in (self.mlp_only_layers or ())

    @property
    def rotary_dim(self) -> int:
        """Return the number of features of a head that RoPE rotates."""
        return int(self.head_dim * self.rope.share)

    @property
    def expert_count(self) -> int:
        """Number of experts in a sparse layer, under either name; 0: no layer has experts."""
        if {MOE_ARCHITECTURE, *HYBRID_MOE_ARCHITECTURES}.isdisjoint(self.architectures):
            return 0
        return self.num_experts if self.num_local_experts is None else self.num_local_experts

    @property
    def weight_format(self) -> WeightFormat | None:
        """Return the format of the layers' weights; None: 16 bits. Raises ValueError."""
        return None if self.quantization_config is None else read_format(self.quantization_config)

    @property
    def format_name(self) -> str:
        """Return the readable name of the layers' weight format; empty: 16 bits."""
        return self.weight_format.name if self.weight_format else ""

    @property
    def own_dtype(self) -> str:
        """Return the data type of the checkpoint; auto: not given."""
        return self.torch_dtype if self.dtype == "auto" else self.dtype

    @property
    def fp8(self) -> bool:
        """Return True if the layers' weights are in e4m3."""
        return self.weight_format is not None and self.weight_format.is_fp8

    @property
    def is_packed(self) -> bool:
        return self.weight_format is not None and not self.weight_format.is_fp8

    @property
    def rope(self) -> Rope:
        """RoPE, from either place in the checkpoint. Raises ValueError for an unsupported kind."""
        return read_rope(self)

    def context(self, max_model_len: int) -> int:
        """Return the context length, tokens: `max_model_len`, or the model's own length if it is 0.

        Raises ModelError if `max_model_len` exceeds the model's own length.
        """
        longest = self.rope.num_positions
        if max_model_len > longest:
            raise ModelError(
                f"max_model_len: got {max_model_len}, expected at most {longest}, the positions of "
                f"the model{'' if self.rope.yarn else '; a rope_scaling by YaRN allows more'}"
            )
        return max_model_len or longest


def read_model_config(
    folder: Path, quantization: str = "none", speculative_method: str = "none"
) -> ModelConfig:
    """Read `config.json`, with the weight format of `--quantization`. Raises ModelError."""
    path = folder / "config.json"
    if folder.is_file() or (folder.is_dir() and not path.exists()):
        files = [] if folder.is_file() else [path.name for path in folder.iterdir()]
        raise ModelError(without_config(str(folder), files))
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    fields = read_json(path, dict[str, Any])
    try:
        fields["is_embedding_model"] = embeds = is_embedding_model(folder)
    except OSError as error:
        raise ModelError(str(error)) from error
    _check_architecture(folder, fields, embeds)
    fields = text_fields(fields)
    _check_format(folder, fields.get(FIELD))
    if embeds:
        fields["tie_word_embeddings"] = True  # there is no output layer
    config = _convert(path, fields)
    try:
        _check_fields(config)
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    config = msgspec.structs.replace(config, reads_mtp=speculative_method == "mtp")
    return quantized(config, quantization)


def text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text part, which a multimodal checkpoint has in `text_config`."""
    if set(HYBRID_ARCHITECTURES).isdisjoint(fields["architectures"]):
        return fields
    text = fields.get("text_config")
    given = HYBRID_DEFAULTS | fields | (text if isinstance(text, dict) else {})
    if given.get("intermediate_size") is None:  # of models in which all layers have experts
        given["intermediate_size"] = given.get("moe_intermediate_size")
    names = "architectures", "tie_word_embeddings"
    return given | {name: fields[name] for name in names if fields.get(name) is not None}


def _convert(path: Path, fields: dict[str, Any]) -> ModelConfig:
    """Convert the fields of `config.json`. As in transformers, null means an absent field.

    `num_key_value_heads` and `head_dim` are exceptions. Raises ModelError if `hidden_act` is null:
    transformers has no default then.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if fields.get("hidden_act", "silu") is None:
        raise ModelError(f'{path}: hidden_act: got null, expected "silu"')
    if fields.get("num_key_value_heads", 0) is None and "num_attention_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    try:
        config = msgspec.convert(given, ModelConfig)
    except msgspec.ValidationError as error:
        problem = explain(str(error), fields, ModelConfig)[1]
        raise ModelError(f"{path} can't be read: {problem}") from error
    if "head_dim" in given or ("head_dim" not in fields and not config.expert_count):
        return config
    head_dim = config.hidden_size // config.num_attention_heads
    return msgspec.structs.replace(config, head_dim=head_dim)


def _check_architecture(folder: Path, fields: dict[str, Any], embeds: bool) -> None:
    """Refuse a checkpoint of another architecture. Raises ModelError."""
    architectures = fields.get("architectures")
    names = list(map(str, architectures)) if isinstance(architectures, list) else []
    if set(SERVED) & set(names):
        return
    if embeds and EMBEDDING_ARCHITECTURE in names:
        return
    served = " or ".join(SERVED)
    hint = architecture_hint([*names, str(fields.get("model_type"))])
    raise ModelError(f"{folder}: architectures: got {architectures}, expected {served}{hint}")


def _check_format(folder: Path, quantization: object) -> None:
    """Refuse weights in a format that can't be read. Raises ModelError."""
    try:
        _ = None if quantization is None else read_format(quantization)
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}; {served_instead(folder)}") from error


def _check_fields(config: ModelConfig) -> None:
    """Refuse a configuration that is not served. Raises ValueError."""
    _ = config.rope
    for field, found, expected in (
        ("attention_bias", config.attention_bias, False),
        ("hidden_act", config.hidden_act, "silu"),
        ("use_sliding_window", config.use_sliding_window, False),
        ("dual_chunk_attention_config", config.dual_chunk_attention_config, None),
        ("attn_output_gate", config.attn_output_gate, True),
        *_expected_kinds(config),
    ):
        if found != expected:
            shown = [msgspec.json.encode(value).decode() for value in (found, expected)]
            raise ValueError("{}: got {}, expected {}".format(field, *shown))
    if config.expert_count and not 1 <= config.num_experts_per_tok <= config.expert_count:
        raise ValueError(
            f"num_experts_per_tok: got {config.num_experts_per_tok}, expected 1 to "
            f"{config.expert_count}, the number of experts"
        )


def _expected_kinds(config: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Return fields about the kinds of layers, with their values and the expected ones."""
    kinds = config.kinds_of_layers
    if not config.is_hybrid:
        return [("layer_types", kind, FULL_ATTENTION) for kind in kinds]
    if set(kinds) != {FULL_ATTENTION, LINEAR_ATTENTION} or len(kinds) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types: got {len(kinds)} of {sorted(set(kinds))}, expected "
            f"{config.num_hidden_layers} of {FULL_ATTENTION} and {LINEAR_ATTENTION}"
        )
    if config.output_gate_type not in ("swish", "silu"):
        raise ValueError(f"output_gate_type: got {config.output_gate_type!r}, expected 'swish'")
    dim, rotated = config.head_dim, config.rotary_dim
    if rotated % 2 or not (rotated == dim or 0 < rotated <= dim // 2):
        share = config.rope.share
        raise ValueError(f"partial_rotary_factor: got {share}, expected 1, or up to 0.5")
    per_key = config.linear_num_value_heads % config.linear_num_key_heads
    return [("linear_num_value_heads modulo linear_num_key_heads", per_key, 0)]


def quantized(config: ModelConfig, quantization: str) -> ModelConfig:
    """Return the model with the weight format of `--quantization`. Raises ModelError."""
    if quantization == "fp8" and config.quantization_config is None:
        return msgspec.structs.replace(config, quantization_config={"quant_method": "fp8"})
    if quantization == "fp8" and not config.fp8:
        raise ModelError(
            f"quantization: got fp8, expected none for weights in {config.format_name}"
        )
    return config


def read_json(path: Path, type_: type[T]) -> T:
    """Decode a file of a checkpoint. Raises ModelError."""
    content = read_bytes(path)
    try:
        return msgspec.json.decode(content, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{error}{hint_of(content)}"
        if isinstance(error, msgspec.ValidationError) and issubclass(type_, Struct):
            field, sentence = explain(str(error), decode_any(content), type_)
            problem = sentence if field else problem
        raise ModelError(f"{path} can't be read: {problem}") from error


def read_bytes(path: Path, size: int = -1) -> bytes:
    """Return the first `size` bytes of a file of a checkpoint, or all. Raises ModelError."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise ModelError(f"{path} can't be read: it is not a regular file")
        with path.open("rb") as file:
            content = file.read(size)
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; a checkpoint needs it") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    if content.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a pointer of Git LFS to the file: run `git lfs pull`")
    return content


def hint_of(content: bytes) -> str:
    """Return the advice for a file whose first bytes contradict its name."""
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return "; it begins with a byte order mark: save it as UTF-8 without one"
    return "; download it again"


_POOLING_MODULES = {"Transformer", "Pooling", "Normalize"}
# fields of last-token pooling, as written before and since sentence-transformers 5.4
_LAST_TOKEN = ("pooling_mode_lasttoken", True), ("pooling_mode", "lasttoken")


class _Module(Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def is_embedding_model(folder: Path) -> bool:
    """Return whether `modules.json` of sentence-transformers ends with a pooling module.

    Raises ModelError for a pooling or module that is not served.
    """
    path = folder / "modules.json"
    if not path.exists():
        return False
    modules = read_json(path, list[_Module])
    pooling = next((module for module in modules if module.name == "Pooling"), None)
    if pooling is None:
        return False
    if others := [module.name for module in modules if module.name not in _POOLING_MODULES]:
        served = ", ".join(sorted(_POOLING_MODULES))
        raise ModelError(f"{path}: got {others[0]}, expected one of {served}")
    config = folder / pooling.path / "config.json"
    if config.parent == folder or not config.exists():
        raise ModelError(f"{config} is missing; an embedding model needs it")
    fields = read_json(config, dict[str, Any])
    if not any(fields.get(name) == value for name, value in _LAST_TOKEN):
        modes = [name for name, value in fields.items() if "pooling_mode" in name and value]
        raise ModelError(f"{config}: got {modes}, expected a pooling of the last token")
    return True


def max_request_bytes(config: Config) -> int:
    """Return the maximum size of a request, bytes; by default, a prompt of full length fits."""
    if config.max_request_bytes:
        return config.max_request_bytes
    context = max(
        read_model_config(model.model_folder).context(model.max_model_len)
        for model in config.by_model()
    )
    return max(MIN_REQUEST_BYTES, REQUEST_BYTES_PER_TOKEN * context)
