"""Names that other trainers have for jaxmem's settings.

One table, which the error about an unknown key reads and which `docs/coming_from.md`
shows. A name with dots stands for its ends too: `optim.lr` for `actor.optim.lr`.
"""

import dataclasses
from collections.abc import Iterable, Iterator

# The versions whose names the table has.
VERSIONS = {
    "TRL": "1.10, in development (July 2026)",
    "Unsloth": "2026.8.19",
    "Axolotl": "0.18.0",
    "torchtune": "0.7.0",
    "verl": "0.10, in development (August 2026)",
    "MaxText": "main of August 2026",
    "Tunix": "0.1.8",
}


@dataclasses.dataclass(frozen=True)
class PeerNames:
    """The names of one setting in other trainers, as words of a text each."""

    key: str  # of jaxmem, perhaps with a value; "" if no key is needed or none exists
    note: str = ""
    trl: str = ""  # and Unsloth's own, which otherwise takes TRL's
    axolotl: str = ""
    torchtune: str = ""
    verl: str = ""
    jax: str = ""  # of MaxText and Tunix

    @property
    def names(self) -> list[str]:
        """All names, of all trainers."""
        peers = self.trl, self.axolotl, self.torchtune, self.verl, self.jax
        return [name for words in peers for name in words.split()]

    def has(self, key: str) -> bool:
        """True if a key that jaxmem does not know is one of the names.

        A name that is the key's own last word is left to the search for fields.
        """
        own = self.key.rpartition(".")[2]
        return key.rpartition(".")[2] != own and any(
            key == name or name.endswith(f".{key}") or key.endswith(f".{name}")
            for name in self.names
        )

    def has_section_of(self, key: str) -> bool:
        """True if a key is, or ends in, one of the names with dots."""
        dotted = [name for name in self.names if "." in name]
        return any(key == name or key.endswith(f".{name}") for name in dotted)


_ACCUMULATION = "gradient_accumulation_steps"
_RESUME = "resume_from_checkpoint"
TABLE = (
    PeerNames(
        "model.checkpoint",
        trl="model model_name_or_path model_name",
        axolotl="base_model",
        torchtune="checkpointer.checkpoint_dir",
        verl="actor_rollout_ref.model.path",
        jax="load_parameters_path model_name model_id",
    ),
    PeerNames(
        "data.source",
        "task.source for prompts",
        trl="train_dataset dataset_name",
        axolotl="datasets",
        torchtune="dataset.source dataset.data_files",
        verl="data.train_files",
        jax="hf_path hf_train_files dataset_name",
    ),
    PeerNames(
        "data.held_out",
        "a fraction; task.held_out for prompts",
        trl="eval_dataset",
        axolotl="val_set_size test_datasets",
        torchtune="dataset_val",
        verl="data.val_files",
        jax="hf_eval_files hf_eval_split",
    ),
    PeerNames(
        "data.columns",
        'jaxmem\'s name first, as in {"prompt": "my_question"}',
        trl="dataset_text_field",
        axolotl="field_messages field_instruction field_output",
        torchtune="dataset.column_map",
        verl="data.prompt_key data.messages_key",
        jax="train_data_columns",
    ),
    PeerNames(
        "data.chat_template",
        trl="chat_template_path",
        axolotl="chat_template_jinja",
    ),
    PeerNames(
        "data.chat_template_kwargs",
        trl="chat_template_kwargs",
        axolotl="chat_template_kwargs",
        verl="data.apply_chat_template_kwargs",
    ),
    PeerNames(
        "data.shuffle",
        "task.shuffle for prompts",
        trl="shuffle_dataset",
        axolotl="shuffle_merged_datasets",
        torchtune="shuffle",
        verl="data.shuffle",
        jax="enable_data_shuffling",
    ),
    PeerNames(
        "data.sequence_length",
        trl="max_length max_seq_length",
        axolotl="sequence_len",
        torchtune="tokenizer.max_seq_len",
        verl="data.max_length",
        jax="max_target_length",
    ),
    PeerNames(
        "",
        "always on",
        trl="packing padding_free packing_strategy",
        axolotl="sample_packing pad_to_sequence_len",
        torchtune="dataset.packed packed",
        verl="use_remove_padding data.pad_mode",
        jax="packing",
    ),
    PeerNames(
        "",
        "answers count, prompts do not; texts count whole",
        trl="assistant_only_loss completion_only_loss train_on_responses_only",
        axolotl="train_on_inputs roles_to_train",
        torchtune="dataset.train_on_input train_on_input masking_strategy",
        jax="sft_train_on_completion_only",
    ),
    PeerNames(
        "data.batch_size",
        "rows on all devices together",
        trl="per_device_train_batch_size",
        axolotl="micro_batch_size",
        torchtune="batch_size",
        verl="data.micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu",
        jax="per_device_batch_size batch_size",
    ),
    PeerNames(
        "run.accumulate",
        trl=_ACCUMULATION,
        axolotl=_ACCUMULATION,
        torchtune=_ACCUMULATION,
        jax=_ACCUMULATION,
    ),
    PeerNames(
        "run.epochs",
        trl="num_train_epochs",
        axolotl="num_epochs",
        torchtune="epochs",
        verl="trainer.total_epochs",
        jax="num_epoch num_train_epochs",
    ),
    PeerNames(
        "run.steps",
        trl="max_steps",
        axolotl="max_steps",
        torchtune="max_steps_per_epoch",
        verl="trainer.total_training_steps",
        jax="steps max_steps",
    ),
    PeerNames(
        "eval.every",
        trl="eval_steps eval_strategy",
        axolotl="eval_steps evals_per_epoch eval_strategy",
        torchtune="run_val_every_n_steps",
        verl="trainer.test_freq",
        jax="eval_interval eval_every_n_steps",
    ),
    PeerNames(
        "eval.at_start",
        trl="eval_on_start",
        verl="trainer.val_before_train",
    ),
    PeerNames(
        "eval.keep_best",
        trl="load_best_model_at_end",
        axolotl="load_best_model_at_end",
    ),
    PeerNames(
        "eval.patience",
        trl="early_stopping_patience",
        axolotl="early_stopping_patience",
    ),
    PeerNames(
        "run.push",
        "OWNER/NAME",
        trl="hub_model_id push_to_hub",
        axolotl="hub_model_id",
    ),
    PeerNames(
        "run.out_dir",
        trl="output_dir",
        axolotl="output_dir",
        torchtune="output_dir",
        verl="trainer.default_local_dir trainer.experiment_name",
        jax="base_output_directory checkpoint_root_directory",
    ),
    PeerNames(
        "run.checkpoint_every",
        trl="save_steps save_strategy",
        axolotl="save_steps saves_per_epoch save_strategy",
        torchtune="save_every_n_steps",
        verl="trainer.save_freq",
        jax="checkpoint_period checkpointing_options.save_interval_steps",
    ),
    PeerNames(
        "run.keep",
        trl="save_total_limit",
        axolotl="save_total_limit",
        torchtune="keep_last_n_checkpoints",
        verl="trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",
        jax="max_num_checkpoints_to_keep checkpointing_options.max_to_keep",
    ),
    PeerNames(
        "",
        "the same command resumes the run in run.out_dir",
        trl=_RESUME,
        axolotl=f"{_RESUME} auto_resume_from_checkpoints",
        torchtune=_RESUME,
        verl="trainer.resume_mode",
    ),
    PeerNames(
        "run.log_every",
        trl="logging_steps",
        axolotl="logging_steps",
        torchtune="log_every_n_steps",
        jax="log_period",
    ),
    PeerNames(
        "run.wandb",
        "the project's name",
        trl="report_to",
        axolotl="wandb_project",
        torchtune="metric_logger.project",
        verl="trainer.project_name",
        jax="metrics_logging_options.project_name",
    ),
    PeerNames(
        "run.seed",
        "data.seed and task.seed for the order",
        trl="seed data_seed random_state",
        axolotl="seed",
        torchtune="seed",
        verl="trainer.seed",
        jax="data_shuffle_seed init_weights_seed rng_seed",
    ),
    PeerNames(
        "optimizer.learning_rate",
        trl="learning_rate",
        axolotl="learning_rate",
        torchtune="optimizer.lr",
        verl="actor.optim.lr",
        jax="learning_rate",
    ),
    PeerNames(
        "optimizer.schedule",
        trl="lr_scheduler_type",
        axolotl="lr_scheduler",
        torchtune="lr_scheduler",
        verl="actor.optim.lr_scheduler_type",
        jax="lr_schedule_type schedule_type",
    ),
    PeerNames(
        "optimizer.warmup_fraction",
        trl="warmup_ratio",
        axolotl="warmup_ratio",
        verl="actor.optim.lr_warmup_steps_ratio",
        jax="warmup_steps_fraction warmup_ratio",
    ),
    PeerNames(
        "optimizer.warmup_steps",
        trl="warmup_steps",
        axolotl="warmup_steps",
        torchtune="lr_scheduler.num_warmup_steps",
        verl="actor.optim.lr_warmup_steps",
        jax="warmup_steps",
    ),
    PeerNames(
        "optimizer.final_fraction",
        axolotl="cosine_min_lr_ratio",
        verl="actor.optim.min_lr_ratio",
        jax="learning_rate_final_fraction",
    ),
    PeerNames(
        "optimizer.clip_norm",
        trl="max_grad_norm",
        axolotl="max_grad_norm",
        torchtune="clip_grad_norm",
        verl="actor.optim.clip_grad",
        jax="gradient_clipping_threshold max_grad_norm",
    ),
    PeerNames(
        "optimizer.weight_decay",
        trl="weight_decay",
        axolotl="weight_decay",
        torchtune="optimizer.weight_decay",
        verl="actor.optim.weight_decay",
        jax="adam_weight_decay weight_decay",
    ),
    PeerNames(
        "optimizer.b1",
        "and optimizer.b2, optimizer.eps",
        trl="adam_beta1 adam_beta2 adam_epsilon",
        axolotl="adam_beta1 adam_beta2 adam_epsilon",
        verl="actor.optim.betas",
        jax="adam_b1 adam_b2 adam_eps",
    ),
    PeerNames(
        "optimizer.name",
        trl="optim",
        axolotl="optimizer",
        torchtune="optimizer._component_",
        verl="actor.optim.optimizer",
        jax="opt_type",
    ),
    PeerNames(
        "model.lora_rank",
        "0 trains all weights",
        trl="lora_r r use_peft full_finetuning",
        axolotl="lora_r adapter",
        torchtune="model.lora_rank",
        verl="actor_rollout_ref.model.lora_rank",
        jax="lora.lora_rank lora.enable_lora lora_config.rank",
    ),
    PeerNames(
        "model.lora_alpha",
        "times the root of the rank for rslora",
        trl="lora_alpha use_rslora",
        axolotl="lora_alpha peft_use_rslora",
        torchtune="model.lora_alpha",
        verl="actor_rollout_ref.model.lora_alpha",
        jax="lora.lora_alpha lora_config.alpha",
    ),
    PeerNames(
        "model.lora_targets",
        "by jaxmem's names of matrices",
        trl="lora_target_modules target_modules",
        axolotl="lora_target_modules lora_target_linear",
        torchtune="model.lora_attn_modules model.apply_lora_to_mlp",
        verl="actor_rollout_ref.model.target_modules",
        jax="lora.lora_module_path lora_config.module_path",
    ),
    PeerNames(
        "model.lora_saved",
        trl="lora_modules_to_save modules_to_save",
        axolotl="lora_modules_to_save",
    ),
    PeerNames("model.lora_head", torchtune="model.apply_lora_to_output"),
    PeerNames(
        "",
        "jaxmem has no dropout",
        trl="lora_dropout",
        axolotl="lora_dropout",
        torchtune="model.lora_dropout",
    ),
    PeerNames(
        'model.base="nf4"',
        trl="load_in_4bit",
        axolotl="load_in_4bit",
        torchtune="model.quantize_base",
        jax="lora.lora_weight_qtype",
    ),
    PeerNames(
        'model.base="int8"',
        trl="load_in_8bit",
        axolotl="load_in_8bit",
    ),
    PeerNames(
        "model.dtype",
        '"bfloat16"',
        trl="bf16 dtype torch_dtype",
        axolotl="bf16 bfloat16",
        torchtune="dtype",
        verl="actor.fsdp_config.dtype",
        jax="dtype",
    ),
    PeerNames(
        "model.param_dtype",
        "of frozen weights",
        verl="actor.fsdp_config.model_dtype",
        jax="weight_dtype",
    ),
    PeerNames(
        "model.attention",
        '"cudnn" or "xla"',
        trl="attn_implementation",
        axolotl="attn_implementation flash_attention sdp_attention",
        jax="attention use_flash_attention",
    ),
    PeerNames(
        "remat.policy",
        '"full", the default, is gradient checkpointing',
        trl="gradient_checkpointing use_gradient_checkpointing activation_offloading",
        axolotl="gradient_checkpointing activation_offloading",
        torchtune="enable_activation_checkpointing enable_activation_offloading",
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
        jax="remat_policy",
    ),
    PeerNames(
        "",
        "always on: the logits are never stored",
        trl="use_liger_kernel use_liger_loss",
        axolotl="chunked_cross_entropy cut_cross_entropy",
        verl="use_fused_kernels",
        jax="num_vocab_tiling",
    ),
    PeerNames(
        "mesh.fsdp",
        trl="fsdp_config deepspeed",
        axolotl="dp_shard_size fsdp_config deepspeed",
        torchtune="data_parallel_shard_dim",
        verl="actor.fsdp_config.fsdp_size",
        jax="ici_fsdp_parallelism mesh.shape",
    ),
    PeerNames(
        "mesh.tensor",
        axolotl="tensor_parallel_size",
        torchtune="tensor_parallel_dim",
        verl="rollout.tensor_model_parallel_size",
        jax="ici_tensor_parallelism",
    ),
    PeerNames(
        "mesh.sequence",
        axolotl="context_parallel_size",
        torchtune="context_parallel_dim",
        verl="actor.ulysses_sequence_parallel_size",
        jax="ici_context_parallelism",
    ),
    PeerNames(
        "",
        "section mesh lays out all devices of all hosts",
        verl="trainer.n_gpus_per_node trainer.nnodes",
    ),
    PeerNames(
        "run.job",
        '"sft", "dpo", "grpo" or "distill"',
        axolotl="rl",
        jax="use_sft use_dpo",
    ),
    PeerNames(
        "grpo.prompts",
        "prompts of a step; TRL counts completions",
        trl="generation_batch_size",
        axolotl="trl.generation_batch_size",
        verl="data.train_batch_size",
    ),
    PeerNames(
        "grpo.group_size",
        trl="num_generations",
        axolotl="trl.num_generations",
        verl="actor_rollout_ref.rollout.n",
        jax="rl.num_generations grpo_config.num_generations",
    ),
    PeerNames(
        "grpo.epochs",
        trl="num_iterations",
        axolotl="trl.num_iterations",
        verl="actor.ppo_epochs",
        jax="rl.num_iterations grpo_config.num_iterations",
    ),
    PeerNames(
        "grpo.minibatches",
        "a number of minibatches, not their size",
        trl="steps_per_generation",
        verl="actor.ppo_mini_batch_size",
        jax="train_micro_batch_size",
    ),
    PeerNames(
        "grpo.kl_coefficient",
        trl="beta",
        axolotl="trl.beta",
        verl="actor.kl_loss_coef actor.use_kl_loss algorithm.use_kl_in_reward",
        jax="rl.grpo_beta grpo_config.beta",
    ),
    PeerNames(
        "grpo.clip_low",
        "and grpo.clip_high",
        trl="epsilon",
        axolotl="trl.epsilon",
        verl="actor.clip_ratio_low actor.clip_ratio",
        jax="rl.grpo_epsilon grpo_config.epsilon",
    ),
    PeerNames(
        "grpo.clip_high",
        trl="epsilon_high",
        axolotl="trl.epsilon_high",
        verl="actor.clip_ratio_high",
        jax="rl.epsilon_high",
    ),
    PeerNames(
        "grpo.entropy_coefficient",
        trl="entropy_coef",
        verl="actor.entropy_coeff",
    ),
    PeerNames(
        "grpo.loss",
        trl="loss_type",
        axolotl="trl.loss_type",
        verl="actor.loss_agg_mode actor.policy_loss.loss_mode",
        jax="rl.loss_algo",
    ),
    PeerNames(
        "grpo.advantage",
        trl="scale_rewards",
        axolotl="trl.scale_rewards",
        verl="algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo",
    ),
    PeerNames(
        "grpo.resample",
        "a number of attempts",
        verl="algorithm.filter_groups.enable",
    ),
    PeerNames("grpo.max_tokens_train", verl="actor.ppo_max_token_len_per_gpu"),
    PeerNames("grpo.correction", verl="algorithm.rollout_correction"),
    PeerNames("eval.samples", verl="rollout.val_kwargs.n"),
    PeerNames(
        "grpo.mask_truncated",
        trl="mask_truncated_completions",
        axolotl="trl.mask_truncated_completions",
    ),
    PeerNames(
        "run.save_rollouts",
        trl="log_completions",
        axolotl="trl.log_completions",
        verl="trainer.rollout_data_dir",
    ),
    PeerNames(
        "task.reward",
        trl="reward_funcs",
        axolotl="trl.reward_funcs",
        verl=(
            "custom_reward_function.path custom_reward_function.name "
            "reward_model.reward_manager"
        ),
        jax="reward_functions reward_functions_path",
    ),
    PeerNames(
        "task.rollout",
        "a function that holds one conversation",
        trl="rollout_func",
        axolotl="trl.rollout_func",
        verl="rollout.agent.agent_loop_config_path rollout.agent.default_agent_loop",
    ),
    PeerNames(
        "task.environment",
        "a class with reset and step",
        trl="environment_factory",
        verl="rollout.multi_turn.interaction_config_path",
    ),
    PeerNames("task.max_turns", verl="rollout.multi_turn.max_assistant_turns"),
    PeerNames(
        "task.max_reply_tokens",
        "tokens of a reply, which is never cut",
        verl="rollout.multi_turn.max_tool_response_length",
    ),
    PeerNames(
        "task.max_prompt_tokens",
        trl="max_prompt_length",
        axolotl="max_prompt_len",
        verl="data.max_prompt_length",
        jax="max_prefill_predict_length rollout_config.max_prompt_length",
    ),
    PeerNames(
        "sampling.max_new_tokens",
        trl="max_completion_length",
        axolotl="trl.max_completion_length",
        verl="data.max_response_length",
        jax="rollout_config.total_generation_steps",
    ),
    PeerNames("sampling.temperature", verl="rollout.temperature"),
    PeerNames(
        "rollouts.engine",
        '"vllm" or "sglang", a server beside the trainer; None: jaxmem samples itself',
        trl="use_vllm",
        axolotl="trl.use_vllm",
        verl="rollout.name",
        jax="rollout_engine",
    ),
    PeerNames(
        "rollouts.urls",
        trl="vllm_server_base_url vllm_server_host vllm_server_port",
        axolotl="trl.vllm_server_host trl.vllm_server_port",
    ),
    PeerNames(
        "rollouts.timeout",
        trl="vllm_server_timeout",
        axolotl="trl.vllm_server_timeout",
    ),
    PeerNames(
        "rollouts.max_staleness",
        "updates, a bound on every token",
        trl="max_staleness",
        verl="async_training.staleness_threshold",
    ),
    PeerNames(
        "",
        "no such setting: engine and trainer have their own GPUs, or jaxmem samples "
        "with the weights that it trains",
        trl="vllm_mode vllm_gpu_memory_utilization",
        axolotl="trl.vllm_mode trl.vllm_gpu_memory_utilization",
        verl="rollout.gpu_memory_utilization",
    ),
    PeerNames("dpo.beta", trl="beta", axolotl="rl_beta", jax="dpo.dpo_beta"),
    PeerNames("dpo.loss", trl="loss_type", axolotl="dpo_loss_type", jax="dpo.algo"),
    PeerNames(
        "dpo.label_smoothing",
        trl="label_smoothing",
        axolotl="dpo_label_smoothing",
        jax="dpo.dpo_label_smoothing",
    ),
    PeerNames("dpo.gamma", axolotl="simpo_gamma"),
    PeerNames("distill.teacher", trl="teacher_model_name_or_path"),
)


def _rows(key: str) -> list[PeerNames]:
    """Rows with a key: by a name with its section if there is one, else by any end."""
    with_section = [row for row in TABLE if row.has_section_of(key)]
    return with_section or [row for row in TABLE if row.has(key)]


def answer(key: str, elsewhere: Iterable[str] = ()) -> str | None:
    """A sentence on the setting that another trainer calls `key`; None: none does.

    Args:
        key: an unknown key, with the section that the user gave it or without.
        elsewhere: keys of jaxmem with that last word, which may be meant as well.
    """
    rows = _rows(key)
    if not rows:
        return None
    if rows[0].has_section_of(key):
        elsewhere = ()
    section, _, name = key.rpartition(".")
    of_section = [row for row in rows if section and row.key.startswith(f"{section}.")]
    if of_section:
        rows, elsewhere = of_section, ()
    if not rows[0].key:
        note = rows[0].note
        if note.startswith("always on"):
            return f"{name} is {note}; leave it out"
        return f"{name}: {note}"
    if '"' in rows[0].key:  # a value is for one name of all sections
        return f"{name} is {rows[0].key}"
    keys = sorted({*elsewhere, *(row.key for row in rows)})
    note = f" ({rows[0].note})" if len(keys) == 1 and rows[0].note else ""
    return f"{key} is {' or '.join(keys)}{note}"


def find_key(name: str) -> str | None:
    """The one key of jaxmem that a word stands for; None if none or several do."""
    rows = [row for row in TABLE if row.has(name) or row.key.endswith(f".{name}")]
    key, *others = {row.key for row in rows} or {""}
    return None if others or not key or "=" in key else key


def markdown() -> Iterator[str]:
    """Lines of the table as Markdown, for `docs/coming_from.md`."""
    yield "| jaxmem | TRL, Unsloth | Axolotl | torchtune | verl | MaxText, Tunix |"
    yield "|---|---|---|---|---|---|"
    for row in TABLE:
        own = ": ".join(filter(None, (row.key and f"`{row.key}`", row.note)))
        peers = row.trl, row.axolotl, row.torchtune, row.verl, row.jax
        cells = [" ".join(f"`{name}`" for name in words.split()) for words in peers]
        yield f"| {own} | {' | '.join(cell or '–' for cell in cells)} |"
