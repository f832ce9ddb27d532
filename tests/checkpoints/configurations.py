"""The tiny configurations of families/: model type and settings of each."""

LOCAL, GLOBAL = "sliding_attention", "full_attention"
LINEAR, CHUNKED = "linear_attention", "chunked_attention"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NEOX = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
GPT2 = {
    "vocab_size": 64, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28, "v_head_dim": 24,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
}  # fmt: skip
# Keys so wide that no head's first result is nearly 0, and then normalised.
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 48,
    "linear_value_head_dim": 20,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0] * 6,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}


def of(model_type, **changes):
    return model_type, SIZES | changes


CONFIGURATIONS = {
    "llama_bias": of("llama", attention_bias=True, mlp_bias=True, head_dim=24),
    "llama_yarn": of("llama", rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3": of("qwen3", head_dim=24),
    "mistral": of("mistral", head_dim=24, sliding_window=5),
    "gemma2": of(
        "gemma2", head_dim=16, sliding_window=5, query_pre_attn_scalar=20,
        num_hidden_layers=4, attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
    ),
    "gemma3": of(
        "gemma3_text", head_dim=24, sliding_window=5, query_pre_attn_scalar=20,
        layer_types=[LOCAL, GLOBAL, LOCAL],
        rope_parameters={
            GLOBAL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            LOCAL: {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "qwen2_yarn": of(
        "qwen2",
        rope_parameters=YARN
        | {"truncate": False, "beta_fast": 8.0, "attention_factor": 0.9},
    ),
    "gemma": of("gemma", head_dim=24),
    "gemma_untied": of("gemma", head_dim=16, tie_word_embeddings=False),
    "vaultgemma": of(
        "vaultgemma", head_dim=24, query_pre_attn_scalar=20, sliding_window=5,
        attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
    ),
    "vaultgemma_untied": of(
        "vaultgemma", head_dim=16, query_pre_attn_scalar=30, sliding_window=7,
        layer_types=[GLOBAL, LOCAL, LOCAL], tie_word_embeddings=False,
        attn_logit_softcapping=None, final_logit_softcapping=None,
    ),
    "ministral": of(
        "ministral", head_dim=24, sliding_window=5, layer_types=[LOCAL, GLOBAL, LOCAL]
    ),
    "ministral_tied": of(
        "ministral", head_dim=16, sliding_window=7, num_key_value_heads=4,
        tie_word_embeddings=True, layer_types=[LOCAL] * 3, rope_parameters=DEFAULT,
    ),
    "ministral3": of(
        "ministral3", head_dim=24,
        rope_parameters=YARN
        | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "ministral3_window": of(
        "ministral3", head_dim=16, sliding_window=5, tie_word_embeddings=True,
        rope_parameters=YARN
        | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8},
    ),
    "phi3": of("phi3"),
    "phi3_partial": of(
        "phi3", sliding_window=5, tie_word_embeddings=True,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.75},
    ),
    "olmo2": of("olmo2"),
    "olmo2_bias": of("olmo2", attention_bias=True, tie_word_embeddings=True),
    "olmo3": of("olmo3", num_hidden_layers=4, sliding_window=5),
    "olmo3_yarn": of(
        "olmo3", sliding_window=5, layer_types=[GLOBAL, LOCAL, LOCAL],
        rope_parameters={
            GLOBAL: YARN, LOCAL: {"rope_type": "default", "rope_theta": 1000.0}
        },
    ),
    "smollm3": of("smollm3", num_hidden_layers=4),
    "smollm3_listed": of(
        "smollm3", no_rope_layers=[0, 1, 0], attention_bias=True,
        tie_word_embeddings=False,
    ),
    "glm4": of("glm4", head_dim=24),
    "glm4_quarter": of(
        "glm4", head_dim=16, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25},
    ),
    "glm": of("glm", head_dim=24),
    "glm_quarter": of(
        "glm", head_dim=16, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25},
    ),
    "granite": of(
        "granite", embedding_multiplier=3.0, logits_scaling=2.5,
        residual_multiplier=0.4, attention_multiplier=0.2,
    ),
    "granite_bias": of(
        "granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "cohere": of("cohere", logit_scale=0.5),
    "cohere_bias": of(
        "cohere", logit_scale=2.0, attention_bias=True, num_key_value_heads=1,
        tie_word_embeddings=False, rope_parameters=DEFAULT,
    ),
    "cohere2": of("cohere2", num_hidden_layers=4, sliding_window=5, logit_scale=0.5),
    "cohere2_listed": of(
        "cohere2", sliding_window=5, attention_bias=True, tie_word_embeddings=False,
        layer_types=[GLOBAL, LOCAL, LOCAL],
    ),
    "nemotron": of("nemotron", head_dim=24),
    "nemotron_bias": of(
        "nemotron", attention_bias=True, mlp_bias=True,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25},
    ),
    "stablelm": of("stablelm"),
    "stablelm_parallel": of("stablelm", use_parallel_residual=True, use_qkv_bias=True),
    "starcoder2": of("starcoder2", sliding_window=5),
    "starcoder2_plain": of("starcoder2", use_bias=False, tie_word_embeddings=False),
    "gpt2": ("gpt2", GPT2),
    "gpt2_narrow": ("gpt2", GPT2 | {"n_inner": 48, "activation_function": "relu"}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox_serial": (
        "gpt_neox",
        NEOX
        | {"use_parallel_residual": False, "tie_word_embeddings": True,
           "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
    ),
    "exaone4": of("exaone4", num_hidden_layers=4, sliding_window=5),
    "exaone4_full": of("exaone4", sliding_window=None, tie_word_embeddings=True,
                       layer_types=[GLOBAL] * 3),
    "seed_oss": of("seed_oss", head_dim=24),
    "seed_oss_bias": of(
        "seed_oss", head_dim=16, attention_out_bias=True, mlp_bias=True
    ),
    "arcee": of("arcee"),
    "arcee_bias": of("arcee", head_dim=24, attention_bias=True, mlp_bias=True),
    "apertus": of("apertus"),
    "apertus_bias": of("apertus", attention_bias=True, rope_parameters=DEFAULT),
    "ernie4_5": of("ernie4_5", head_dim=24),
    "ernie4_5_bias": of(
        "ernie4_5", head_dim=16, use_bias=True, tie_word_embeddings=False
    ),
    "hunyuan": of("hunyuan_v1_dense", head_dim=24),
    "hunyuan_alpha": of(
        "hunyuan_v1_dense", head_dim=16,
        rope_parameters={
            "rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0
        },
    ),
    "qwen3_moe": of(
        "qwen3_moe", head_dim=24, norm_topk_prob=True, **EXPERTS
    ),
    "qwen3_moe_few": of(
        "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, head_dim=16,
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, **EXPERTS
    ),
    "mixtral": of("mixtral", num_local_experts=4),
    "mixtral_window": of(
        "mixtral", num_local_experts=3, num_experts_per_tok=1, sliding_window=5,
        head_dim=24, tie_word_embeddings=True,
    ),
    "olmoe": of("olmoe", num_experts=5, num_experts_per_tok=2),
    "olmoe_bias": of(
        "olmoe", num_experts=4, num_experts_per_tok=3, norm_topk_prob=True,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "qwen2_moe": of(
        "qwen2_moe", shared_expert_intermediate_size=40, **EXPERTS
    ),
    "qwen2_moe_few": of(
        "qwen2_moe", num_hidden_layers=4, shared_expert_intermediate_size=24,
        mlp_only_layers=[0], norm_topk_prob=True, qkv_bias=False,
        use_sliding_window=True, sliding_window=5, max_window_layers=3, **EXPERTS
    ),
    "glm4_moe": of(
        "glm4_moe", n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        moe_intermediate_size=32, routed_scaling_factor=1.5, use_qk_norm=True,
        head_dim=24,
    ),
    "glm4_moe_plain": of(
        "glm4_moe", n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2,
        moe_intermediate_size=24, first_k_dense_replace=2, norm_topk_prob=False,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "gpt_oss": of(
        "gpt_oss", num_local_experts=4, head_dim=24, sliding_window=5,
        num_experts_per_tok=2, swiglu_limit=1.5,
        rope_parameters=YARN | {"truncate": False},
    ),
    "gpt_oss_plain": of(
        "gpt_oss", num_local_experts=5, head_dim=16, sliding_window=7,
        num_experts_per_tok=3, attention_bias=False, tie_word_embeddings=True,
        layer_types=[GLOBAL, LOCAL, LOCAL],
        rope_parameters=DEFAULT,
    ),
    "deepseek_v2": of(
        "deepseek_v2", **LATENT, first_k_dense_replace=1, n_routed_experts=8,
        num_experts_per_tok=3, topk_method="group_limited_greedy", n_group=4,
        topk_group=2, routed_scaling_factor=2.0, moe_intermediate_size=24,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v2_plain": of(
        "deepseek_v2", **LATENT | {"q_lora_rank": None, "qk_nope_head_dim": 8},
        n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=32,
        n_shared_experts=1, attention_bias=True, tie_word_embeddings=True,
    ),
    "deepseek_v3": of(
        "deepseek_v3", **LATENT, first_k_dense_replace=1, n_routed_experts=8,
        num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=24,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "deepseek_v3_plain": of(
        "deepseek_v3", **LATENT | {"q_lora_rank": None, "v_head_dim": 8},
        first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=32, norm_topk_prob=False,
        attention_bias=True, tie_word_embeddings=True,
    ),
    "qwen3_next": of(
        "qwen3_next",
        **DELTA | {"linear_key_head_dim": 32, "linear_value_head_dim": 24},
        num_hidden_layers=4, head_dim=24, shared_expert_intermediate_size=40, **EXPERTS,
    ),
    "qwen3_next_listed": of(
        "qwen3_next", linear_num_value_heads=2, linear_num_key_heads=2, head_dim=16,
        linear_key_head_dim=24, linear_value_head_dim=16, mlp_only_layers=[1],
        layer_types=[GLOBAL, LINEAR, GLOBAL], norm_topk_prob=False,
        shared_expert_intermediate_size=24, tie_word_embeddings=True, **EXPERTS,
    ),
    "qwen3_5": of("qwen3_5_text", **DELTA, num_hidden_layers=4, head_dim=24),
    "qwen3_5_listed": of(
        "qwen3_5_text", **DELTA | {"linear_value_head_dim": 24}, head_dim=16,
        linear_conv_kernel_dim=3, layer_types=[LINEAR, GLOBAL, LINEAR],
        attention_bias=True, tie_word_embeddings=True,
    ),
    "qwen3_5_moe": of(
        "qwen3_5_moe_text", **DELTA, head_dim=24, layer_types=[LINEAR, GLOBAL, LINEAR],
        shared_expert_intermediate_size=40, **EXPERTS,
    ),
    "qwen3_5_moe_tied": of(
        "qwen3_5_moe_text", **DELTA | {"linear_value_head_dim": 24}, head_dim=16,
        linear_conv_kernel_dim=3, layer_types=[GLOBAL, LINEAR, LINEAR],
        attention_bias=True, tie_word_embeddings=True,
        shared_expert_intermediate_size=24,
        **EXPERTS | {"num_experts_per_tok": 3},
    ),
    "llama_dynamic": of(
        "llama", rope_parameters=DEFAULT | {"rope_type": "dynamic", "factor": 2.0}
    ),
    "llama_dynamic_beyond": of(
        "llama", head_dim=24, max_position_embeddings=10,
        rope_parameters=DEFAULT | {"rope_type": "dynamic", "factor": 2.0},
    ),
    "llama_long": of(  # what is sampled passes 10 tokens
        "llama", head_dim=12,
        rope_parameters=LONG | {"original_max_position_embeddings": 10},
    ),
    "phi3_beyond": of(
        "phi3", original_max_position_embeddings=5, rope_parameters=LONG
        | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 5},
    ),
    "phi3_passing": of(  # what is sampled passes 10 tokens: rows are read again
        "phi3", original_max_position_embeddings=10, rope_parameters=LONG
        | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 10},
    ),
    "phi3_long": of(
        "phi3", max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters=LONG | {"partial_rotary_factor": 0.75},
    ),
    "phimoe": of(  # transformers takes short factors for all documents
        "phimoe", num_local_experts=4, attention_bias=True, lm_head_bias=True,
        router_jitter_noise=0.4, max_position_embeddings=128,
        rope_parameters=LONG
        | {"short_mscale": 1.1, "long_mscale": 1.2, "short_factor": [1.5] * 8,
           "long_factor": [1.5] * 8, "original_max_position_embeddings": 5},
    ),
    "phimoe_plain": of("phimoe", num_local_experts=3, sliding_window=5, head_dim=24),
    "minimax_m2": of(
        "minimax_m2", num_local_experts=5, num_experts_per_tok=2, head_dim=24,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.5},
    ),
    "minimax_m2_quarter": of(
        "minimax_m2", num_local_experts=4, num_experts_per_tok=1, head_dim=16,
        tie_word_embeddings=True,
        rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25},
    ),
    "gemma4": of(
        "gemma4_text", num_hidden_layers=6, head_dim=16, global_head_dim=24,
        attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=5,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        layer_types=[LOCAL, LOCAL, GLOBAL] * 2, final_logit_softcapping=3.0,
    ),
    "gemma4_reuse": of(
        "gemma4_text", num_hidden_layers=7, head_dim=16, global_head_dim=24,
        attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=5,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        layer_types=[LOCAL, GLOBAL] * 2 + [LOCAL, LOCAL, GLOBAL],
        num_kv_shared_layers=3, use_double_wide_mlp=True,
    ),
    "gemma4_reuse_plain": of(
        "gemma4_text", num_hidden_layers=4, head_dim=16, global_head_dim=16,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=64,
        layer_types=[LOCAL, GLOBAL, GLOBAL, GLOBAL], sliding_window=7,
        num_kv_shared_layers=2, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16, enable_moe_block=True, attention_bias=True,
    ),
    "gemma4_experts": of(
        "gemma4_text", head_dim=24, sliding_window=5, num_experts=6, top_k_experts=2,
        moe_intermediate_size=32, enable_moe_block=True, hidden_size_per_layer_input=0,
        layer_types=[LOCAL, GLOBAL, GLOBAL], global_head_dim=24,
    ),
    "gemma4_plain": of(
        "gemma4_text", head_dim=24, global_head_dim=16, sliding_window=5,
        hidden_size_per_layer_input=0, layer_types=[LOCAL, LOCAL, GLOBAL],
        attention_bias=True, tie_word_embeddings=False,
    ),
    "llama4": of(  # chunks of 5 tokens, queries that grow every 3
        "llama4_text", num_hidden_layers=4, head_dim=24, attention_chunk_size=5,
        intermediate_size=32, intermediate_size_mlp=48, num_local_experts=4,
        interleave_moe_layer_step=2, floor_scale=3, attn_scale=0.7,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama4_every": of(
        "llama4_text", num_hidden_layers=4, head_dim=16, attention_chunk_size=7,
        no_rope_layers=[1, 0, 1, 1], layer_types=[CHUNKED, GLOBAL, GLOBAL, CHUNKED],
        intermediate_size=32, num_local_experts=3, num_experts_per_tok=2,
        attn_temperature_tuning=False, use_qk_norm=False, attention_bias=True,
        tie_word_embeddings=True, rope_parameters=DEFAULT,
    ),
    "helium": of("helium", head_dim=16),
    "helium_bias": of("helium", head_dim=16, attention_bias=True, mlp_bias=True),
    "nanochat": of("nanochat"),
    "nanochat_bias": of(
        "nanochat", attention_bias=True, final_logit_softcapping=3.0
    ),
    "phi": of("phi"),
    "phi_quarter": of(
        "phi", rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25},
        num_key_value_heads=4,
    ),
}  # fmt: skip
