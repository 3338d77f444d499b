"""Llama 4's attention temperature, which transformers takes from cache slots, by position instead.

Layers without rotary embedding multiply their queries by a number that grows with the token's
place. transformers counts slots there, so that a left-padded prompt gets other logits than alone;
everywhere else it counts positions, which are the same where nothing is padded.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def tuned_by_position(model: torch.nn.Module) -> Iterator[None]:
    """Make every layer that tunes its temperature read position_ids, which its caller must give."""
    with contextlib.ExitStack() as stack:
        for layer in list(model.modules()):
            attention: Any = getattr(layer, "self_attn", None)
            # Where there is rotary embedding nothing is tuned, and a norm would undo our factor.
            if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
                _tune(layer, attention, stack)
        yield


def _tune(layer: torch.nn.Module, attention: Any, stack: contextlib.ExitStack) -> None:
    """Multiply what a layer's query projection gives until the stack unwinds."""
    stack.callback(setattr, attention, "attn_temperature_tuning", attention.attn_temperature_tuning)
    attention.attn_temperature_tuning = False
    position_ids: list[torch.Tensor] = []  # of the layer's run: attention itself is not given any

    def remember(_: torch.nn.Module, __: Any, keywords: dict[str, Any]) -> None:
        position_ids[:] = [keywords["position_ids"]]

    def scale(_: torch.nn.Module, __: Any, query: torch.Tensor) -> torch.Tensor:
        floors = torch.floor((position_ids.pop().float() + 1.0) / attention.floor_scale)
        scales = torch.log1p(floors) * attention.attn_scale + 1.0
        return (query * scales.unsqueeze(-1)).to(query.dtype)

    for handle in (
        layer.register_forward_pre_hook(remember, with_kwargs=True),
        attention.q_proj.register_forward_hook(scale),
    ):
        stack.callback(handle.remove)
