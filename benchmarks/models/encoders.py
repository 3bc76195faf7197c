"""Encoders of text, and encoders with decoders, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from .hub import BATCH, SEQUENCE, VOCABULARY, hub, padded, random_tokens


def _masked() -> dict[str, Any]:
    tokens, mask = random_tokens(), padded()
    labels = tokens.masked_fill((torch.rand(tokens.shape) > 0.3) | (mask == 0), -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _pretraining() -> dict[str, Any]:
    batch = _masked()
    return {**batch, "next_sentence_label": torch.randint(2, (BATCH,))}


def _classified() -> dict[str, Any]:
    return {"input_ids": random_tokens(), "attention_mask": padded(), "labels": torch.randint(2, (BATCH,))}


def _answered() -> dict[str, Any]:
    positions = torch.randint(SEQUENCE * 3 // 4, (2, BATCH))
    return {
        "input_ids": random_tokens(),
        "attention_mask": padded(),
        "start_positions": positions[0],
        "end_positions": positions[1],
    }


def _discriminated() -> dict[str, Any]:
    labels = torch.randint(2, (BATCH, SEQUENCE)).float()
    return {"input_ids": random_tokens(), "labels": labels}


def _boxed() -> dict[str, Any]:
    corners = torch.randint(500, (BATCH, SEQUENCE, 2))
    return {**_masked(), "bbox": torch.cat([corners, corners + torch.randint(1, 400, corners.shape)], -1)}


_SIZES = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_ROBERTA = {**_SIZES, "pad_token_id": 1, "type_vocab_size": 1}


def _encoder(name: str, prefix: str, settings: dict[str, Any] = _SIZES, **more: Any) -> None:
    hub(name, f"{prefix}Config", f"{prefix}ForMaskedLM", settings, _masked, **more)


hub("bert", "BertConfig", "BertForPreTraining", _SIZES, _pretraining)
_encoder("roberta", "Roberta", _ROBERTA)
hub("albert", "AlbertConfig", "AlbertForSequenceClassification", _SIZES, _classified, embedding_size=16)
hub(
    "distilbert",
    "DistilBertConfig",
    "DistilBertForQuestionAnswering",
    {"vocab_size": VOCABULARY, "pad_token_id": 0},
    _answered,
    dim=32,
    hidden_dim=64,
    n_layers=3,
    n_heads=4,
    max_position_embeddings=64,
)
hub("electra", "ElectraConfig", "ElectraForPreTraining", _SIZES, _discriminated, embedding_size=16)
_encoder(
    "deberta", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False
)
_encoder(
    "deberta-v2",
    "DebertaV2",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=8,
    conv_kernel_size=3,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
)
_encoder("longformer", "Longformer", _ROBERTA, attention_window=16)
_encoder("big-bird", "BigBird", block_size=4, num_random_blocks=1, attention_type="block_sparse")
_encoder("fnet", "FNet")
_encoder(
    "funnel",
    "Funnel",
    {"vocab_size": VOCABULARY},
    d_model=32,
    d_inner=64,
    n_head=4,
    d_head=8,
    block_sizes=[1, 1, 1],
)
hub("layoutlm", "LayoutLMConfig", "LayoutLMForMaskedLM", _SIZES, _boxed)
_encoder("mobilebert", "MobileBert", embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16)
_encoder("squeezebert", "SqueezeBert", embedding_size=32)
_encoder("convbert", "ConvBert", embedding_size=32)
_encoder("modernbert", "ModernBert", local_attention=8)
_encoder("roformer", "RoFormer", embedding_size=32)
_encoder("esm", "Esm", _ROBERTA, mask_token_id=3, position_embedding_type="rotary")
_encoder("xmod", "Xmod", _ROBERTA, languages=["en"], default_language="en")
hub(
    "canine",
    "CanineConfig",
    "CanineForSequenceClassification",
    {**_SIZES, "max_position_embeddings": 64},
    _classified,
    downsampling_rate=4,
    local_transformer_stride=16,
    num_hash_buckets=64,
    num_hash_functions=4,
)


# ---------------------------------------------------------------------- encoder and decoder


def _translated() -> dict[str, Any]:
    tokens, mask = random_tokens(), padded()
    return {"input_ids": tokens, "attention_mask": mask, "labels": random_tokens(sequence=SEQUENCE // 2)}


_D = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "use_cache": False,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def _translator(name: str, prefix: str, settings: dict[str, Any] = _D, **more: Any) -> None:
    hub(name, f"{prefix}Config", f"{prefix}ForConditionalGeneration", settings, _translated, **more)


_translator("t5", "T5", _T5)
_translator("umt5", "UMT5", _T5)
_translator("longt5-local", "LongT5", _T5, local_radius=7, encoder_attention_type="local")
_translator(
    "switch-transformers",
    "SwitchTransformers",
    _T5,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)
_translator("bart", "Bart")
hub("marian", "MarianConfig", "MarianMTModel", _D, _translated)
_translator("pegasus", "Pegasus")
_translator("pegasus-x", "PegasusX", num_global_tokens=4, block_size=8)
_translator("m2m-100", "M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0)
_translator(
    "led", "LED", attention_window=8, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64
)
_translator(
    "nllb-moe",
    "NllbMoe",
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    num_experts=4,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
    expert_capacity=64,
)
_translator(
    "prophetnet",
    "ProphetNet",
    {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    hidden_size=32,
    encoder_ffn_dim=64,
    num_encoder_layers=2,
    num_encoder_attention_heads=4,
    decoder_ffn_dim=64,
    num_decoder_layers=2,
    num_decoder_attention_heads=4,
    max_position_embeddings=64,
    decoder_start_token_id=0,
    ngram=2,
    num_buckets=8,
    relative_max_distance=16,
    use_cache=False,
)
hub(
    "fsmt",
    "FSMTConfig",
    "FSMTForConditionalGeneration",
    {k: v for k, v in _D.items() if k != "vocab_size"},
    lambda: {**_translated(), "labels": random_tokens()},
    langs=["en", "de"],
    src_vocab_size=VOCABULARY,
    tgt_vocab_size=VOCABULARY,
)
