"""How many bytes each part of a replica takes, for its plan of memory."""

import torch

from infra.machine import MEMORY_PART, memory_bytes
from infra.settings import Settings
from serving.replica.backbone import Backbone
from serving.replica.engine import LOGPROB_ROWS
from serving.replica.memory import Costs, MemoryPlan, plan_memory
from serving.replica.trainer import TorchTrainer

FLOAT = 4
OPTIMIZER_COPIES = 9
"""Vectors as long as the factors: values, gradients, two moments, a step's scratch; snapshots of what is published,
stored and taken up again."""
LOGIT_COPIES = 3
"""Of the logits while a token is drawn: in the model's type, in fp32, sorted or normalised."""


def budget_of(settings: Settings) -> int:
    """Return the bytes that this replica may take."""
    if settings.replica.memory_bytes is not None:
        return int(settings.replica.memory_bytes)
    if torch.device(settings.model.device).type == "cuda":
        return int(MEMORY_PART * torch.cuda.mem_get_info(settings.model.device)[1])
    return int(MEMORY_PART * memory_bytes())


def plan_for(backbone: Backbone, trainer: TorchTrainer, settings: Settings) -> MemoryPlan:
    """Return what fits beside a backbone that is loaded and not packed. Raises ``ConfigError``."""
    replica = settings.replica
    return plan_memory(
        budget_of(settings), costs_of(backbone, trainer, settings), rows=replica.rows, places=replica.places
    )


def costs_of(backbone: Backbone, trainer: TorchTrainer, settings: Settings) -> Costs:
    """Measure the parts. ``trainer`` tells what a micro-batch keeps."""
    replica, item, rank = settings.replica, backbone.dtype.itemsize, settings.max_rank
    version = FLOAT * rank * sum(d_out + d_in for d_out, d_in in (m.shape for m in backbone.linears.values()))
    widest = max(sum(group.sizes) for group in backbone.groups)
    tokens = replica.token_budget + replica.rows
    step = tokens * (4 * backbone.config.hidden_size + 3 * widest) * item
    step += tokens * replica.max_total_tokens * item  # masks of attention
    step += LOGIT_COPIES * FLOAT * (replica.rows + LOGPROB_ROWS) * backbone.config.vocab_size
    training = [0, 0]
    if replica.shard is not None:
        training = [
            OPTIMIZER_COPIES * version + trainer.activation_bytes(trainer.most_tokens, checkpointed=again)
            for again in (False, True)
        ]
    return Costs(
        weights=backbone.weight_bytes,
        packed=backbone.packable_bytes if settings.model.packed else 0,
        place=sum(group.place_bytes(rank) for group in backbone.groups),
        version=version,
        row=2 * sum(heads * dim for heads, dim in backbone.kv_sizes) * replica.max_total_tokens * item,
        step=step,
        training=training[0],
        training_checkpointed=training[1],
    )
