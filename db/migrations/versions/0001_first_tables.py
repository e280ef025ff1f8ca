"""First tables."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

POINTERS = ("initial_uid", "desired_uid", "previous_uid")


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("backbone", sa.Text(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("targets", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("initial_uid", sa.Text(), nullable=False),
        sa.Column("desired_uid", sa.Text(), nullable=False),
        sa.Column("previous_uid", sa.Text(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("training", sa.Boolean(), nullable=False),
        sa.Column(
            "publishing",
            sa.Enum("off", "guarded", name="publishing", native_enum=False, create_constraint=True, length=16),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_adapters")),
    )
    op.create_table(
        "arrivals",
        sa.Column("slot_s", sa.Double(), nullable=False),
        sa.Column("gateway_id", sa.Text(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("slot_s", "gateway_id", "replica_id", "adapter", name=op.f("pk_arrivals")),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("detail", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "decisions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("leader_epoch", sa.BigInteger(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.Column("weights", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("train_shares", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decisions")),
    )
    op.create_index(op.f("ix_decisions_at_s"), "decisions", ["at_s"], unique=False)
    op.create_table(
        "heartbeats",
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("queued", sa.BigInteger(), nullable=False),
        sa.Column("running", sa.BigInteger(), nullable=False),
        sa.Column("queue_age_s", sa.Double(), nullable=False),
        sa.Column("ttft_p95_s", sa.Double(), nullable=False),
        sa.Column("tpot_p95_s", sa.Double(), nullable=False),
        sa.Column("finished", sa.BigInteger(), nullable=False),
        sa.Column("violations", sa.BigInteger(), nullable=False),
        sa.Column("requests_total", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("train_tokens_total", sa.BigInteger(), nullable=False),
        sa.Column("train_tokens_decoding_total", sa.BigInteger(), nullable=False),
        sa.Column("train_share", sa.Double(), nullable=False),
        sa.Column("round_id", sa.Text(), nullable=True),
        sa.Column("active", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("active_uids", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("resident", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("swaps_total", sa.BigInteger(), nullable=False),
        sa.Column("kv_used", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_heartbeats")),
        postgresql_with={"fillfactor": 50},
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "leadership",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("leader_id", sa.Text(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_leadership_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leadership")),
    )
    op.create_table(
        "quality",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column(
            "split",
            sa.Enum("train", "gate", "report", name="split", native_enum=False, create_constraint=True, length=16),
            nullable=False,
        ),
        sa.Column("set_sha256", sa.Text(), nullable=False),
        sa.Column("nll_by_row", sa.ARRAY(sa.Double()), nullable=False),
        sa.Column("tokens_by_row", sa.ARRAY(sa.Integer()), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("uid", "client_id", "split", "set_sha256", name=op.f("pk_quality")),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("backbone", sa.Text(), nullable=False),
        sa.Column("has_shard", sa.Boolean(), nullable=False),
        sa.Column("started_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("parent_uid", sa.Text(), nullable=True),
        sa.Column("round_id", sa.Text(), nullable=True),
        sa.Column(
            "state",
            sa.Enum(
                "candidate",
                "promoted",
                "rejected",
                name="versionstate",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("store_key", sa.Text(), nullable=False),
        sa.Column("mlflow_model_id", sa.Text(), nullable=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], name=op.f("fk_adapter_versions_adapter")),
        sa.ForeignKeyConstraint(["parent_uid"], ["adapter_versions.uid"], name=op.f("fk_adapter_versions_parent_uid")),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint("adapter", "number", name=op.f("uq_adapter_versions_adapter_number")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.Column("tagged", sa.BigInteger(), nullable=True),
        sa.Column("tags", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], name=op.f("fk_outbox_adapter")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_index("ix_outbox_pending", "outbox", ["id"], unique=False, postgresql_where=sa.text("NOT done"))
    op.create_index(
        "ix_outbox_projected", "outbox", ["adapter", "alias", "id"], unique=False, postgresql_where=sa.text("done")
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "planned",
                "training",
                "aggregating",
                "evaluating",
                "promoted",
                "rejected",
                "aborted",
                name="roundstate",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("base_uid", sa.Text(), nullable=False),
        sa.Column("base_epoch", sa.BigInteger(), nullable=False),
        sa.Column("plan", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("clients", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("candidate_uid", sa.Text(), nullable=True),
        sa.Column("aggregation_error", sa.Double(), nullable=True),
        sa.Column("ce_before", sa.Double(), nullable=True),
        sa.Column("ce_after", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("started_s", sa.Double(), nullable=False),
        sa.Column("decided_s", sa.Double(), nullable=True),
        sa.Column("served_s", sa.Double(), nullable=True),
        sa.Column("flow_run_id", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], name=op.f("fk_rounds_adapter")),
        sa.ForeignKeyConstraint(["base_uid"], ["adapter_versions.uid"], name=op.f("fk_rounds_base_uid")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("adapter", "number", name=op.f("uq_rounds_adapter_number")),
    )
    op.create_index(
        "uq_rounds_unfinished",
        "rounds",
        ["adapter"],
        unique=True,
        postgresql_where=sa.text("state IN ('planned', 'training', 'aggregating', 'evaluating')"),
    )
    op.create_table(
        "updates",
        sa.Column("round_id", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("base_uid", sa.Text(), nullable=False),
        sa.Column(
            "factor",
            sa.Enum("A", "B", "both", name="factor", native_enum=False, create_constraint=True, length=16),
            nullable=False,
        ),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("store_key", sa.Text(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("loss_first", sa.Double(), nullable=False),
        sa.Column("loss_last", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("accepted", sa.Boolean(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_updates_round_id")),
        sa.PrimaryKeyConstraint("round_id", "client_id", name=op.f("pk_updates")),
    )
    # adapters and adapter_versions point at each other.
    for column in POINTERS:
        op.create_foreign_key(
            op.f(f"fk_adapters_{column}"),
            "adapters",
            "adapter_versions",
            [column],
            ["uid"],
            deferrable=True,
            initially="DEFERRED",
        )


def downgrade() -> None:
    for column in POINTERS:
        op.drop_constraint(op.f(f"fk_adapters_{column}"), "adapters", type_="foreignkey")
    op.drop_table("updates")
    op.drop_index(
        "uq_rounds_unfinished",
        table_name="rounds",
        postgresql_where=sa.text("state IN ('planned', 'training', 'aggregating', 'evaluating')"),
    )
    op.drop_table("rounds")
    op.drop_index("ix_outbox_projected", table_name="outbox", postgresql_where=sa.text("done"))
    op.drop_index("ix_outbox_pending", table_name="outbox", postgresql_where=sa.text("NOT done"))
    op.drop_table("outbox")
    op.drop_table("adapter_versions")
    op.drop_table("replicas")
    op.drop_table("quality")
    op.drop_table("leadership")
    op.drop_table("heartbeats")
    op.drop_index(op.f("ix_decisions_at_s"), table_name="decisions")
    op.drop_table("decisions")
    op.drop_table("audit")
    op.drop_table("arrivals")
    op.drop_table("adapters")
