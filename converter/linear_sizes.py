"""The linear weights of a decoder by shape, as quantisation sees them; no weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class LinearSize:
    """One linear weight, or a stack of those of all experts.

    Attributes:
        name: Of the parameter.
        parameter: [out_features, in_features] or transposed; [experts, .., ..] of a stack.
        module: That computes with it; None for a stack.
        out_features: N.
        in_features: K.
        count: Matrices: the experts of a stack, else 1.
        active: Matrices that a token is multiplied by.
        is_head: Whether it makes the logits.
        is_router: Whether it chooses experts.
    """

    name: str
    parameter: torch.Tensor
    module: torch.nn.Module | None
    out_features: int
    in_features: int
    count: int = 1
    active: int = 1
    is_head: bool = False
    is_router: bool = False


def linear_sizes(model: PreTrainedModel) -> Iterator[LinearSize]:
    """Yield the linear layers of a decoder, and the stacks of its experts."""
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    counts = {getattr(config, name, None) for name in _NUM_EXPERTS} - {None}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            first, second = module.weight.shape
            is_transposed = isinstance(module, Conv1D)
            out_features, in_features = (second, first) if is_transposed else (first, second)
            yield LinearSize(
                name=f"{path}.weight",
                parameter=module.weight,
                module=module,
                out_features=out_features,
                in_features=in_features,
                is_head=module is head,
                is_router=out_features in counts,
            )
        elif "Experts" in type(module).__name__:
            for name, stack in module.named_parameters(recurse=False):
                if stack.dim() == 3:
                    count, out_features, in_features = stack.shape
                    yield LinearSize(
                        name=f"{path}.{name}",
                        parameter=stack,
                        module=None,
                        out_features=out_features,
                        in_features=in_features,
                        count=count,
                        active=getattr(config, "num_experts_per_tok", None) or 1,
                    )
