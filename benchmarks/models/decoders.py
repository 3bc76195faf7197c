"""Language models that predict the next token, of `transformers`."""

from __future__ import annotations

from typing import Any

from .hub import VOCABULARY, hub, padded, random_tokens


def _next_token() -> dict[str, Any]:
    tokens, mask = random_tokens(), padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _short() -> dict[str, Any]:
    tokens = random_tokens(sequence=12)
    return {"input_ids": tokens, "labels": tokens.clone()}


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_PLAIN = {"vocab_size": VOCABULARY, **_SPECIAL}
_LLAMA = {
    **_PLAIN,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ROTARY = {**_LLAMA, "head_dim": 8}
_FULL = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_GPT = {**_PLAIN, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}


def _decoder(name: str, prefix: str, settings: dict[str, Any], **more: Any) -> None:
    hub(name, f"{prefix}Config", f"{prefix}ForCausalLM", settings, _next_token, **more)


hub("gpt2", "GPT2Config", "GPT2LMHeadModel", _GPT, _next_token)
hub("gpt-bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT, _next_token)
_decoder(
    "gpt-neo",
    "GPTNeo",
    _PLAIN,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    window_size=8,
    attention_types=[[["global", "local"], 2]],
    max_position_embeddings=64,
)
_decoder("gpt-neox", "GPTNeoX", _FULL)
_decoder("gptj", "GPTJ", _GPT, rotary_dim=4)
_decoder(
    "opt",
    "OPT",
    _PLAIN,
    hidden_size=32,
    num_hidden_layers=3,
    ffn_dim=64,
    num_attention_heads=4,
    max_position_embeddings=64,
    word_embed_proj_dim=32,
)
_decoder("bloom", "Bloom", _PLAIN, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.1)
_decoder("mpt", "Mpt", _PLAIN, d_model=32, n_layers=3, n_heads=4, max_seq_len=64)
_decoder("falcon", "Falcon", _FULL)
_decoder("llama", "Llama", _ROTARY)
_decoder(
    "llama-dynamic",
    "Llama",
    _ROTARY,
    rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
)
_decoder("mistral", "Mistral", _ROTARY, sliding_window=8)
_decoder("mixtral", "Mixtral", _ROTARY, num_local_experts=4)
_decoder("qwen2", "Qwen2", _LLAMA)
_decoder("qwen3", "Qwen3", _ROTARY)
_decoder("qwen3-moe", "Qwen3Moe", _ROTARY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_decoder("gemma", "Gemma", _ROTARY)
hub(
    "gemma3",
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    _ROTARY,
    _next_token,
    sliding_window=8,
    query_pre_attn_scalar=8,
)
_decoder("phi", "Phi", _FULL)
_decoder("phi3", "Phi3", _LLAMA)
_decoder("stablelm", "StableLm", _LLAMA)
_decoder("starcoder2", "Starcoder2", _LLAMA)
_decoder("olmo2", "Olmo2", _LLAMA)
_decoder("cohere", "Cohere", _LLAMA)
_decoder("gpt-oss", "GptOss", _ROTARY, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
_decoder(
    "deepseek-v3",
    "DeepseekV3",
    _FULL,
    num_key_value_heads=4,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
hub(
    "mamba",
    "MambaConfig",
    "MambaForCausalLM",
    _PLAIN,
    _short,
    hidden_size=32,
    state_size=8,
    num_hidden_layers=2,
)
_decoder(
    "mamba2",
    "Mamba2",
    _PLAIN,
    hidden_size=32,
    state_size=8,
    num_hidden_layers=2,
    num_heads=8,
    head_dim=8,
    n_groups=2,
    chunk_size=16,
)
hub(
    "rwkv",
    "RwkvConfig",
    "RwkvForCausalLM",
    _PLAIN,
    _short,
    hidden_size=32,
    num_hidden_layers=2,
    attention_hidden_size=32,
    intermediate_size=64,
    context_length=12,
)
_decoder("recurrent-gemma", "RecurrentGemma", _FULL, lru_width=32, attention_window_size=16)
_decoder(
    "jamba",
    "Jamba",
    _LLAMA,
    num_experts=4,
    num_experts_per_tok=2,
    use_mamba_kernels=False,
    mamba_d_state=8,
    attn_layer_period=2,
    attn_layer_offset=1,
)
_decoder(
    "xlstm", "xLSTM", _PLAIN, hidden_size=32, num_hidden_layers=2, num_blocks=2, num_heads=4, chunk_size=16
)
hub(
    "reformer",
    "ReformerConfig",
    "ReformerModelWithLMHead",
    _SPECIAL,
    _next_token,
    vocab_size=VOCABULARY,
    hidden_size=32,
    feed_forward_size=64,
    attn_layers=["local", "lsh"],
    axial_pos_shape=[8, 4],
    axial_pos_embds_dim=[16, 16],
    num_attention_heads=2,
    attention_head_size=16,
    local_attn_chunk_length=8,
    lsh_attn_chunk_length=8,
    num_hashes=1,
    num_buckets=4,
    is_decoder=True,
    max_position_embeddings=32,
    hash_seed=0,
)
hub(
    "xlnet",
    "XLNetConfig",
    "XLNetLMHeadModel",
    {"vocab_size": VOCABULARY, "pad_token_id": 0},
    _next_token,
    d_model=32,
    n_layer=3,
    n_head=4,
    d_inner=64,
)
hub(
    "xlm",
    "XLMConfig",
    "XLMWithLMHeadModel",
    {"vocab_size": VOCABULARY, "pad_token_id": 0},
    _next_token,
    emb_dim=32,
    n_layers=3,
    n_heads=4,
)
