"""A tiny unquantised Llama as a GGUF file, as llama.cpp writes it, with a byte-like vocabulary."""

from pathlib import Path

import gguf
from transformers import PreTrainedModel

from tiny_decoders import tiny_model


def tiny_gguf_model() -> PreTrainedModel:
    """Return the model that `write_tiny_gguf` writes."""
    return tiny_model(
        "llama", num_hidden_layers=1, num_key_value_heads=4, vocab_size=64, pad_token_id=None
    )


def write_tiny_gguf(path: Path, *, num_parts: int = 1) -> None:
    """Write the model and its tokenizer; the license is MIT.

    Args:
        path: The file.
        num_parts: What the file says of itself: how many files make up the model.
    """
    model = tiny_gguf_model()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("mit")
    if num_parts > 1:
        writer.add_uint16("split.count", num_parts)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(0x41 + index) for index in range(63)), "AB"])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    layer = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        **{f"blk.0.{ours}": f"model.layers.0.{theirs}" for ours, theirs in layer.items()},
    }
    weights = model.state_dict()
    for ours, theirs in names.items():
        writer.add_tensor(f"{ours}.weight", weights[f"{theirs}.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
