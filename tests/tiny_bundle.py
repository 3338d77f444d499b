"""Tiny bundles built by hand: a byte tokenizer and a one-layer decoder with random weights.

The decoder has learned positions (so position ids matter), two query heads over one cached head,
and weights large enough that every input moves the logits. `TinyDecoder.reference` computes the
same logits in numpy float64 without a cache.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvconv import names
from kvconv.cache_layout import stored_tensors
from kvconv.manifest import AttentionFlavour, CacheDtype, CacheLayer, Manifest, Source, file_entry

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
NUM_HEADS, HEAD_DIM, HIDDEN_SIZE = 2, 8, 16
MAX_SEQUENCE_LENGTH = 64
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
_ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
}


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes; then BOS (put before a text), EOS and PAD."""
    # How byte level tokenizers spell bytes: printable ones as themselves, the others from 256 up.
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    vocab = {chr(byte if byte in shown else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def cache_layer(dtype: CacheDtype) -> CacheLayer:
    """Return the cache of the one layer."""
    return CacheLayer(1, HEAD_DIM, HEAD_DIM, dtype)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass
class TinyDecoder:
    """The weights, the graph and the float64 reference of the tiny decoder."""

    seed: int = 0
    weights: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        shapes = {
            "embedding": (VOCAB_SIZE, HIDDEN_SIZE),
            "positions": (MAX_SEQUENCE_LENGTH, HIDDEN_SIZE),
            "q_proj": (HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
            "k_proj": (HIDDEN_SIZE, HEAD_DIM),
            "v_proj": (HIDDEN_SIZE, HEAD_DIM),
            "o_proj": (NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
            "lm_head": (HIDDEN_SIZE, VOCAB_SIZE),
        }
        self.weights = {
            name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()
        }

    def reference(self, tokens: list[int]) -> np.ndarray:
        """Return the logits of one unpadded sequence, [len(tokens), vocab_size] float64."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        hidden = w["embedding"][tokens] + w["positions"][: len(tokens)]
        query = (hidden @ w["q_proj"]).reshape(-1, NUM_HEADS, HEAD_DIM).transpose(1, 0, 2)
        scores = query @ (hidden @ w["k_proj"]).T / np.sqrt(HEAD_DIM)
        future = np.triu(np.ones((len(tokens), len(tokens)), bool), k=1)
        heads = softmax(np.where(future, -np.inf, scores)) @ (hidden @ w["v_proj"])
        merged = heads.transpose(1, 0, 2).reshape(len(tokens), -1)
        return (hidden + merged @ w["o_proj"]) @ w["lm_head"]

    def graph(
        self, attention: AttentionFlavour, cache_dtype: CacheDtype = "float32"
    ) -> onnx.ModelProto:
        """Return the graph with kvconv's names: pasts in, presents out."""
        constants = dict(self.weights)
        nodes: list[onnx.NodeProto] = []

        def add(op_type: str, inputs: list[str], output: str, **attributes: object) -> str:
            nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
            return output

        def constant(name: str, value: object, dtype: type = np.int64) -> str:
            constants[name] = np.array(value, dtype)
            return name

        tokens = add("Gather", ["embedding", names.INPUT_IDS], "tokens")
        places = add("Gather", ["positions", names.POSITION_IDS], "places")
        hidden = add("Add", [tokens, places], "hidden")
        for name in ("q", "k", "v"):
            add("MatMul", [hidden, f"{name}_proj"], name)
        tensors = stored_tensors(cache_layer(cache_dtype))
        if attention == "flash":
            given = {"query": "q", "key": "k", "value": "v", "attention_mask": names.ATTENTION_MASK}
            given |= {f"past_{tensor.name}": names.past(0, tensor.name) for tensor in tensors}
            nodes.append(
                helper.make_node(
                    names.OP_NAME,
                    [given.get(name, "") for name in names.FLASH_ATTENTION_INPUTS],
                    ["merged", *(names.present(0, tensor.name) for tensor in tensors)],
                    domain=names.OP_DOMAIN,
                    num_heads=NUM_HEADS,
                    kv_num_heads=1,
                )
            )
        elif attention == "gqa":
            ones = add(
                "ReduceSum", [names.ATTENTION_MASK, constant("row", [1])], "ones", keepdims=0
            )
            last = add("Sub", [ones, constant("one", 1)], "last_slot")
            shape = add("Shape", [names.ATTENTION_MASK], "total", start=1)
            lengths = [add("Cast", [x], f"{x}_int32", to=TensorProto.INT32) for x in (last, shape)]
            nodes.append(
                helper.make_node(
                    names.GROUP_QUERY_ATTENTION,
                    ["q", "k", "v", names.past_key(0), names.past_value(0), *lengths],
                    ["merged", names.present_key(0), names.present_value(0)],
                    domain=names.ORT_DOMAIN,
                    num_heads=NUM_HEADS,
                    kv_num_heads=1,
                )
            )
        else:
            self._add_standard_attention(add, constant, _ELEMENT_TYPES[cache_dtype])
        projected = add("MatMul", ["merged", "o_proj"], "projected")
        last = add("Add", [hidden, projected], "last")
        constants[names.NUM_LOGITS_TO_KEEP] = np.array(0, np.int64)
        keep = add("Neg", [names.NUM_LOGITS_TO_KEEP], "keep_from")
        starts = add("Reshape", [keep, constant("one_item", [1])], "starts")
        ends, axes = constant("ends", [2**63 - 1]), constant("axes", [1])
        kept = add("Slice", [last, starts, ends, axes], "kept")
        add("MatMul", [kept, "lm_head"], names.LOGITS)

        integer = TensorProto.INT64
        info = helper.make_tensor_value_info

        def cached(name: Callable[[int, names.CacheTensorName], str], slots: str | None) -> list:
            return [
                info(
                    name(0, tensor.name),
                    _ELEMENT_TYPES[tensor.element],
                    [names.DIM_BATCH, 1, slots, tensor.width],
                )
                for tensor in tensors
            ]

        inputs = [
            info(names.INPUT_IDS, integer, [names.DIM_BATCH, names.DIM_SEQUENCE]),
            info(names.ATTENTION_MASK, integer, [names.DIM_BATCH, names.DIM_TOTAL]),
            info(names.POSITION_IDS, integer, [names.DIM_BATCH, names.DIM_SEQUENCE]),
            *cached(names.past, names.DIM_PAST),
            info(names.NUM_LOGITS_TO_KEEP, integer, []),
        ]
        outputs = [
            info(names.LOGITS, TensorProto.FLOAT, [names.DIM_BATCH, None, VOCAB_SIZE]),
            *cached(names.present, None),
        ]
        initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
        graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
        version = 1 if len(tensors) == 2 else names.OP_VERSION
        domains = {"": 18, names.OP_DOMAIN: version, names.ORT_DOMAIN: 1}
        opsets = [helper.make_opsetid(*entry) for entry in domains.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    @staticmethod
    def _add_standard_attention(add, constant, cache_type: int) -> None:  # type: ignore[no-untyped-def]
        """Concat caches, then causal and masked attention in plain operators."""
        zero, one = constant("zero", 0), constant("one", 1)
        for name, past, present in (
            ("k", names.past_key(0), names.present_key(0)),
            ("v", names.past_value(0), names.present_value(0)),
        ):
            new = add("Unsqueeze", [name, constant(f"{name}_axis", [1])], f"{name}_heads")
            new = add("Cast", [new], f"{name}_new", to=cache_type)
            add("Concat", [past, new], present, axis=2)
            add("Cast", [present], f"{name}_all", to=TensorProto.FLOAT)
        shape = constant("split_heads", [0, 0, NUM_HEADS, HEAD_DIM])
        add("Transpose", [add("Reshape", ["q", shape], "q_split")], "q_heads", perm=[0, 2, 1, 3])
        add("Transpose", ["k_all"], "k_transposed", perm=[0, 1, 3, 2])
        dots = add("MatMul", ["q_heads", "k_transposed"], "dots")
        scores = add("Mul", [dots, constant("scale", HEAD_DIM**-0.5, np.float32)], "scores")
        total = add("Gather", [add("Shape", [names.ATTENTION_MASK], "mask_shape"), one], "total")
        new = add("Gather", [add("Shape", [names.INPUT_IDS], "ids_shape"), one], "sequence")
        slots = add("Range", [zero, total, one], "slots")
        queries = add("Range", [add("Sub", [total, new], "past"), total, one], "queries")
        rows = add("Unsqueeze", [queries, constant("row_axis", [1])], "query_rows")
        causal = add("LessOrEqual", [slots, rows], "causal")
        seen = add("Cast", [names.ATTENTION_MASK], "mask_bool", to=TensorProto.BOOL)
        seen = add("Unsqueeze", [seen, constant("mask_axes", [1, 2])], "mask_4d")
        allowed = add("And", [seen, causal], "allowed")
        low = constant("low", -1e9, np.float32)
        weights = add(
            "Softmax", [add("Where", [allowed, scores, low], "masked")], "weights", axis=-1
        )
        heads = add("MatMul", [weights, "v_all"], "heads")
        rows_first = add("Transpose", [heads], "rows_first", perm=[0, 2, 1, 3])
        add("Reshape", [rows_first, constant("merge", [0, 0, NUM_HEADS * HEAD_DIM])], "merged")


def letter_decoder(*, ends: bool = False) -> TinyDecoder:
    """Return a decoder that answers in letters, and EOS if it `ends`: other logits are low."""
    decoder = TinyDecoder(seed=5)
    decoder.weights["embedding"][:, 0] = 1
    decoder.weights["positions"][:, 0] = 0
    decoder.weights["o_proj"][:, 0] = 0
    decoder.weights["lm_head"][0, :] = -1000
    decoder.weights["lm_head"][0, [*range(ord("a"), ord("z")), *[EOS] * ends]] = 0
    return decoder


def write_bundle(
    folder: Path,
    *,
    decoder: TinyDecoder | None = None,
    attention: AttentionFlavour = "standard",
    cache_dtype: CacheDtype = "float32",
    eos_token_ids: tuple[int, ...] = (EOS,),
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a complete bundle and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = (decoder or TinyDecoder()).graph(attention, cache_dtype)
    onnx.checker.check_model(model)
    onnx.save(model, folder / names.MODEL_FILE)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    write_manifest(folder, model, attention, cache_dtype, eos_token_ids)
    return folder


def write_manifest(
    folder: Path,
    model: onnx.ModelProto,
    attention: AttentionFlavour = "standard",
    cache_dtype: CacheDtype = "float32",
    eos_token_ids: tuple[int, ...] = (EOS,),
) -> Manifest:
    """Write a manifest that lists every file now in the folder."""
    files = sorted(path for path in folder.iterdir() if path.name != names.MANIFEST_FILE)
    manifest = Manifest(
        source=Source("tiny", "folder"),
        architecture="TinyForCausalLM",
        model_type="tiny",
        attention=attention,
        dtype="float32",
        weights_dtype="float32",
        opset=18,
        op_version=names.FLOAT_CACHES_OP_VERSION if attention == "flash" else None,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        eos_token_ids=eos_token_ids,
        bos_token_id=BOS,
        pad_token_id=PAD,
        cache_layers=(cache_layer(cache_dtype),),
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(value.name for value in model.graph.output),
        rewrites={},
        files={path.name: file_entry(path) for path in files},
    )
    manifest.write(folder)
    return manifest
