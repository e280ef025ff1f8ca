"""An engine as the settings want it, as large as its memory allows."""

import structlog
import torch

from infra.models import model_dir
from infra.settings import Settings
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.sizing import plan_for
from serving.replica.tokenizer import HubTokenizer
from serving.replica.trainer import TorchTrainer

log = structlog.get_logger()


def load_engine(settings: Settings) -> TorchEngine:
    """Load the backbone that the settings name, for this process's one engine thread. Raises ``ConfigError``."""
    if torch.device(settings.model.device).type != "cpu":
        log.warning("device_is_experimental", device=settings.model.device, why="no GPU has run this code yet")
    torch.set_num_threads(settings.model.threads)
    folder, replica = model_dir(settings), settings.replica
    tokenizer = HubTokenizer(folder)
    backbone = Backbone.load(folder, settings.model.model_copy(update={"packed": False}))
    plan = plan_for(backbone, TorchTrainer(backbone, tokenizer, replica.row_tokens), settings)
    log.info(
        "memory_planned",
        budget=plan.budget,
        used=plan.used,
        rows=plan.rows,
        versions=plan.versions,
        packed=plan.packed,
        checkpointed=plan.checkpointed,
    )
    if plan.packed:
        backbone.pack()
    return TorchEngine(
        backbone,
        rows=plan.rows,
        max_total_tokens=replica.max_total_tokens,
        places=replica.places,
        max_rank=settings.max_rank,
        versions=plan.versions,
        batch_invariant=replica.batch_invariant,
        make_trainer=lambda backbone: TorchTrainer(
            backbone, tokenizer, replica.row_tokens, checkpoint_layers=plan.checkpointed
        ),
    )
