"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its absorbed form.

Such a layer caches one latent per token, from which it computes keys and values of all heads:

    score(head, query, token) = query_nope . (W_K latent) + query_rope . key_rope
    output(head) = sum over tokens of weight * (W_V latent)

Instead of computing W_K latent and W_V latent for the whole past in every step, each query takes
W_K and each output takes W_V. What remains is attention with one key/value head whose key is
(key_rope, latent) and whose value is latent, and that is what the cache holds.

Letters: B batch, N query heads, S new tokens, T past and new, P width of a query without rotary
embedding (nope), R width of its rotated part, L width of the latent, V width of a value head.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvconv.errors import UnsupportedModelError

_KEY, _VALUE = "kv_b_proj_key", "kv_b_proj_value"
"""Buffers that a layer has while it is traced."""


class LatentLayer(DynamicLayer):
    """The cache of one layer: keys [B,1,T,R+L], values [B,1,T,L]."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append what the layer caches, the latent [B,1,S,L] and its key_rope [B,1,S,R].

        Returns:
            The operands of expand_kv: latents [B,1,T,L], keys [B,1,T,R+L].
        """
        latent, key_rope = key_states, value_states
        keys, latents = super().update(torch.cat((key_rope, latent), -1), latent)
        return latents, keys


def latent_layers(model: torch.nn.Module) -> dict[int, Any]:
    """Return the attention modules that cache a latent, by layer index.

    Raises:
        UnsupportedModelError: One has a part that the absorbed form does not express.
    """
    layers: dict[int, Any] = {}
    module: Any
    for module in model.modules():
        if not callable(getattr(module, "expand_kv", None)):
            continue
        if getattr(module, "indexer", None) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} selects the tokens it attends to with an indexer that "
                f"has a cache of its own (sparse attention), which kvconv does not support. Choose "
                f"a model with dense latent attention, such as DeepSeek-V3."
            )
        if module.kv_b_proj.bias is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__}.kv_b_proj has a bias; kvconv supports latent attention "
                f"without one."
            )
        layers[module.layer_idx] = module
    return layers


@contextlib.contextmanager
def absorbed(model: PreTrainedModel) -> Iterator[None]:
    """Make a model's latent attention layers call their attention in the absorbed form.

    During the call each such layer hands keys and values to the attention function as the cache
    (a `LatentLayer`) holds them; the attention function asks `absorb` and `expand`.
    """
    layers = latent_layers(model).values()
    try:
        for module in layers:
            weight = module.kv_b_proj.weight.detach()  # [N*(P+V), L]
            heads = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
            key, value = heads.split([module.qk_nope_head_dim, module.v_head_dim], 1)
            # Views: nothing is copied until the weights are written.
            module.register_buffer(_KEY, key, persistent=False)
            module.register_buffer(_VALUE, value.transpose(1, 2), persistent=False)
            module.expand_kv = lambda latents, keys: (keys, latents)
        yield
    finally:
        for module in layers:
            for name in (_KEY, _VALUE, "expand_kv"):
                if name in vars(module) or name in module._buffers:
                    delattr(module, name)


def absorb(module: torch.nn.Module, query: torch.Tensor) -> torch.Tensor:
    """Return queries [B,N,S,R+L] for queries [B,N,S,P+R]; others as they are."""
    key = module._buffers.get(_KEY)
    if key is None:
        return query
    nope, rope = query.split([key.shape[1], query.shape[3] - key.shape[1]], -1)
    return torch.cat((rope, nope @ key), -1)


def expand(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return outputs [B,S,N,V] for outputs [B,S,N,L]; others as they are."""
    value = module._buffers.get(_VALUE)
    if value is None:
        return output
    return (output.transpose(1, 2) @ value).transpose(1, 2)
