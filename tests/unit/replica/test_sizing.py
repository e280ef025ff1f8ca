"""What the plan of memory reckons with is what the engine takes."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from infra.errors import ConfigError
from infra.settings import Settings
from serving.replica.backbone import Backbone
from serving.replica.engine import TorchEngine
from serving.replica.fake_engine import FakeTokenizer
from serving.replica.memory import PROCESS_BYTES
from serving.replica.sizing import costs_of, plan_for
from serving.replica.trainer import TorchTrainer

LLAMA = LlamaConfig(
    vocab_size=270,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
GPT2 = GPT2Config(vocab_size=270, n_embd=32, n_layer=2, n_head=4, n_positions=128)


def settings(**replica: object) -> Settings:
    values = {"rows": 5, "places": 3, "max_total_tokens": 96, "row_tokens": 64, "max_rank": 16, "shard": "s.jsonl"}
    return Settings.model_validate({"replica": {**values, **replica}})


def backbone_of(config: PreTrainedConfig) -> Backbone:
    torch.manual_seed(0)
    return Backbone(AutoModelForCausalLM.from_config(deepcopy(config)).eval(), sha256="0" * 64, packed=False)


def trainer_of(backbone: Backbone) -> TorchTrainer:
    return TorchTrainer(backbone, FakeTokenizer(), 64)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_rows_places_and_weights_take_what_was_reckoned(config: PreTrainedConfig) -> None:
    backbone = backbone_of(config)
    costs = costs_of(backbone, trainer_of(backbone), settings())
    engine = TorchEngine(backbone, rows=5, max_total_tokens=96, places=3, max_rank=16)
    assert costs.row * 5 == sum(t.nbytes for t in (*engine._keys, *engine._values))
    assert costs.place * 3 == sum(group.a.nbytes + group.b.nbytes for group in backbone.groups)
    assert costs.weights == sum(t.numel() * 4 for t in {p.data_ptr(): p for p in backbone.model.parameters()}.values())
    assert 0 < costs.packed < 2 * costs.weights
    assert 0 < costs.training_checkpointed < costs.training


def test_a_replica_without_a_shard_keeps_nothing_for_training() -> None:
    backbone = backbone_of(LLAMA)
    assert costs_of(backbone, trainer_of(backbone), settings(shard=None)).training == 0


def test_a_small_budget_means_fewer_rows_and_one_that_is_too_small_is_refused() -> None:
    backbone = backbone_of(LLAMA)
    trainer = trainer_of(backbone)
    costs = costs_of(backbone, trainer, settings(memory_bytes="4GB"))
    plenty = plan_for(backbone, trainer, settings(memory_bytes="4GB"))
    assert (plenty.rows, plenty.packed, plenty.checkpointed) == (5, True, False)
    least = PROCESS_BYTES + costs.weights + 3 * costs.place + 7 * costs.version + costs.step
    short = least + costs.training_checkpointed + 2 * costs.row
    plan = plan_for(backbone, trainer, settings(memory_bytes=short))
    assert (plan.rows, plan.packed, plan.checkpointed) == (2, False, True)
    with pytest.raises(ConfigError, match="COLLM_REPLICA__MEMORY_BYTES"):
        plan_for(backbone, trainer, settings(memory_bytes=short - 2 * costs.row))
