"""Words of commands that name small jobs: a shipped config, and its settings."""

TINY = (
    "model.layers=2", "model.hidden=32", "model.ff=64", "model.heads=2",
    "model.kv_heads=2", "model.head_dim=16", "head.chunk=32",
)  # fmt: skip
GRPO = (
    "grpo_arithmetic.gin", *TINY, "grpo.prompts=2", "grpo.group_size=4",
    "grpo.max_tokens_train=128", "grpo.max_tokens_forward=256",
    "grpo.kl_coefficient=0.1",
)  # fmt: skip
