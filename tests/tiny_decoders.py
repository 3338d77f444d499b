"""Seeded tiny decoders whose logits depend on everything: windows, caps, norms, masks, positions.

Hugging Face's own initialisation is so small that windows and softcaps barely move the logits, and
a wrong one would pass. Here weights are large, norms are random and caps are tight.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tiny_bundle import BOS, EOS, PAD, VOCAB_SIZE, byte_tokenizer

WINDOW = 4
_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
_WINDOWED = {"sliding_window": WINDOW, "layer_types": LAYER_TYPES}
_CHUNKED = {
    "attention_chunk_size": WINDOW,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
_YARN_MSCALE = _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e2,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [3.0, 9.0],
    "original_max_position_embeddings": 16,
}
"""Value of rope_parameters that switches frequencies just beyond what the tests' prompts reach."""
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama+llama3": _LLAMA | {"rope_parameters": LLAMA3_ROPE},
    "mistral": _LLAMA | {"sliding_window": WINDOW},
    "qwen2": _LLAMA
    | {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _LLAMA | {"head_dim": 12, "rope_parameters": _YARN},
    "gemma2": _LLAMA | _WINDOWED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": _LLAMA
    | _WINDOWED
    | {"query_pre_attn_scalar": 20, "rope_parameters": _TWO_ROPES},
    "phi3": _LLAMA | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "gpt2": _GPT,
    "gpt_neox": _LLAMA | {"rotary_pct": 0.5},
    "gptj": _GPT | {"rotary_dim": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 128},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 128},
    "falcon+alibi": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 128, "alibi": True}
    | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    | {"max_position_embeddings": 128, "window_size": WINDOW}
    | {"attention_types": [[["global", "local"], 1]]},
    "mpt": {"d_model": 36, "n_layers": 2, "n_heads": 3, "max_seq_len": 128},
    "mixtral": _LLAMA | _EXPERTS | {"sliding_window": None},
    "gpt_oss": _LLAMA | _EXPERTS | _WINDOWED | {"rope_parameters": _YARN},
    "deepseek_v3": _LLAMA
    | {
        "rope_parameters": _YARN_MSCALE,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
    },
    "llama4_text": _LLAMA
    | _EXPERTS
    | _CHUNKED
    | {"intermediate_size_mlp": 48, "moe_layers": [1], "floor_scale": 4, "use_qk_norm": False},
    "smollm3": _LLAMA | {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "cohere": _LLAMA | {"logit_scale": 1.0},
}
"""Model type -> config; what follows a + tells variants of one model type apart.

llama has tied embeddings only where a test asks for them.
"""
OWN_ATTENTION = ("bloom", "falcon", "falcon+alibi", "gpt_neo", "mpt")
"""Those whose classes do not know transformers' attention interface."""


def tiny_model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """Return a decoder of two layers with fixed random weights, in eval mode."""
    tokens = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    settings = CONFIGS.get(model_type, {}) | tokens | overrides
    config = AutoConfig.for_model(model_type.partition("+")[0], **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            # Matrices keep activations near 1; vectors are norms and biases, far from 0 and 1.
            spread = weight.shape[-1] ** -0.5 * 1.5 if weight.dim() > 1 else 0.5
            centre = 0.0 if weight.dim() > 1 else 0.6
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread + centre)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # part of the checkpoint, and 0 at first
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.5)
    return model.eval().requires_grad_(False)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte tokenizer, which starts every text with BOS."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def save_tiny(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """Write a tiny decoder and its tokenizer as Hugging Face does; returns the folder."""
    tiny_model(model_type, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def padded_batch(
    rows: int = 3, length: int = 13
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input_ids, attention_mask and position_ids of a left-padded batch.

    Each is [rows, length] int64; row i has 2 * i padded slots.
    """
    input_ids = torch.arange(rows * length).reshape(rows, length) * 37 % 256
    attention_mask = torch.ones((rows, length), dtype=torch.int64)
    for row in range(rows):
        attention_mask[row, : 2 * row] = 0
    return input_ids, attention_mask, (attention_mask.cumsum(-1) - 1).clamp(min=0)
