"""Models of sound, of several modalities, and of time series, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from .hub import BATCH, VOCABULARY, hub, images, padded, random_tokens

_SAMPLES = 1200


def _transcribed() -> dict[str, Any]:
    return {"input_features": torch.randn(4, 16, 64), "labels": random_tokens(4, 12)}


def _spoken() -> dict[str, Any]:
    return {"input_values": torch.randn(4, _SAMPLES), "labels": random_tokens(4, 6, 32)}


def _heard() -> dict[str, Any]:
    return {
        "input_values": torch.randn(4, _SAMPLES),
        "attention_mask": torch.ones(4, _SAMPLES, dtype=torch.int64),
    }


def _commands() -> dict[str, Any]:
    return {"input_values": torch.randn(4, _SAMPLES), "labels": torch.randint(10, (4,))}


def _spectrograms() -> dict[str, Any]:
    return {"input_values": torch.randn(4, 64, 32), "labels": torch.randint(10, (4,))}


_SPEECH = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "pad_token_id": 0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "num_feat_extract_layers": 3,
}

hub(
    "whisper",
    "WhisperConfig",
    "WhisperForConditionalGeneration",
    {},
    _transcribed,
    vocab_size=VOCABULARY,
    num_mel_bins=16,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_source_positions=32,
    max_target_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    use_cache=False,
)
hub("wav2vec2-ctc", "Wav2Vec2Config", "Wav2Vec2ForCTC", _SPEECH, _spoken)
hub(
    "wav2vec2-commands",
    "Wav2Vec2Config",
    "Wav2Vec2ForSequenceClassification",
    {**_SPEECH, "num_labels": 10, "classifier_proj_size": 16},
    _commands,
)
hub("hubert", "HubertConfig", "HubertForCTC", _SPEECH, _heard)
hub("wavlm", "WavLMConfig", "WavLMForCTC", _SPEECH, _heard)
hub(
    "wav2vec2-conformer",
    "Wav2Vec2ConformerConfig",
    "Wav2Vec2ConformerForCTC",
    _SPEECH,
    _heard,
    conv_depthwise_kernel_size=5,
)
hub("sew", "SEWConfig", "SEWForCTC", _SPEECH, _heard, squeeze_factor=2)
hub(
    "audio-spectrogram",
    "ASTConfig",
    "ASTForAudioClassification",
    {},
    _spectrograms,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    patch_size=8,
    frequency_stride=8,
    time_stride=8,
    max_length=64,
    num_mel_bins=32,
    num_labels=10,
)
hub(
    "speech-to-text",
    "Speech2TextConfig",
    "Speech2TextForConditionalGeneration",
    {},
    lambda: {"input_features": torch.randn(4, 64, 16), "labels": random_tokens(4, 12)},
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    input_feat_per_channel=16,
    conv_channels=16,
    max_source_positions=64,
    max_target_positions=32,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    use_cache=False,
)
hub(
    "univnet",
    "UnivNetConfig",
    "UnivNetModel",
    {},
    lambda: {"input_features": torch.randn(2, 8, 16), "noise_sequence": torch.randn(2, 8, 8)},
    model_in_channels=8,
    model_hidden_channels=8,
    num_mel_bins=16,
    kernel_predictor_hidden_channels=8,
    kernel_predictor_num_blocks=1,
    resblock_stride_sizes=[2, 2, 2],
)

# ---------------------------------------------------------------------- several modalities

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _pairs() -> dict[str, Any]:
    return {
        "input_ids": random_tokens(),
        "attention_mask": padded(),
        "pixel_values": images(32),
        "return_loss": True,
    }


def _towers(name: str, prefix: str, **more: Any) -> None:
    hub(
        name,
        f"{prefix}Config",
        f"{prefix}Model",
        {"text_config": _TEXT, "vision_config": _VISION},
        _pairs,
        **more,
    )


_towers("clip", "CLIP", projection_dim=16)
_towers("siglip", "Siglip")
hub(
    "blip",
    "BlipConfig",
    "BlipForConditionalGeneration",
    {"text_config": {**_TEXT, "encoder_hidden_size": 32}, "vision_config": _VISION},
    lambda: {"input_ids": random_tokens(), "pixel_values": images(32), "labels": random_tokens()},
    projection_dim=16,
    image_text_hidden_size=16,
)
hub(
    "git",
    "GitConfig",
    "GitForCausalLM",
    _TEXT,
    lambda: {
        "input_ids": random_tokens(),
        "attention_mask": padded(),
        "pixel_values": images(32),
        "labels": random_tokens(),
    },
    vision_config=_VISION,
)
hub(
    "lxmert",
    "LxmertConfig",
    "LxmertForQuestionAnswering",
    _TEXT,
    lambda: {
        "input_ids": random_tokens(),
        "attention_mask": padded(),
        "visual_feats": torch.randn(BATCH, 6, 16),
        "visual_pos": torch.rand(BATCH, 6, 4),
        "labels": torch.randint(7, (BATCH,)),
    },
    l_layers=2,
    x_layers=1,
    r_layers=1,
    visual_feat_dim=16,
    num_qa_labels=7,
)
hub(
    "flava",
    "FlavaConfig",
    "FlavaModel",
    {},
    _pairs,
    text_config=_TEXT,
    image_config=_VISION,
    multimodal_config={k: v for k, v in _VISION.items() if "size" in k or "num" in k},
    hidden_size=32,
    projection_dim=16,
)
hub(
    "llava",
    "LlavaConfig",
    "LlavaForConditionalGeneration",
    {},
    lambda: {
        "input_ids": torch.cat([torch.full((BATCH, 16), 95), random_tokens(BATCH, 16, 90)], 1),
        "pixel_values": images(32),
        "labels": random_tokens(),
    },
    image_token_index=95,
    text_config={"model_type": "llama", **_TEXT, "num_key_value_heads": 2},
    vision_config={"model_type": "clip_vision_model", **_VISION},
    image_token_id=95,
)
hub(
    "trocr",
    "TrOCRConfig",
    "TrOCRForCausalLM",
    {},
    lambda: {"input_ids": random_tokens(), "labels": random_tokens()},
    vocab_size=VOCABULARY,
    d_model=32,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    use_cache=False,
)
hub(
    "sam",
    "SamConfig",
    "SamModel",
    {},
    lambda: {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 60},
    vision_config={
        **_VISION,
        "image_size": 64,
        "output_channels": 16,
        "global_attn_indexes": [1],
        "window_size": 4,
        "mlp_dim": 64,
        "num_pos_feats": 8,
    },
    prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
    mask_decoder_config={
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    },
)
hub(
    "decision-transformer",
    "DecisionTransformerConfig",
    "DecisionTransformerModel",
    {},
    lambda: {
        "states": torch.randn(BATCH, 10, 5),
        "actions": torch.randn(BATCH, 10, 2),
        "rewards": torch.randn(BATCH, 10, 1),
        "returns_to_go": torch.randn(BATCH, 10, 1),
        "timesteps": torch.arange(10).expand(BATCH, 10).clone(),
        "attention_mask": torch.ones(BATCH, 10),
    },
    state_dim=5,
    act_dim=2,
    hidden_size=32,
    n_layer=2,
    n_head=4,
    max_ep_len=20,
    use_cache=False,
)


# ---------------------------------------------------------------------- time series

_SERIES = {
    "prediction_length": 6,
    "context_length": 16,
    "input_size": 1,
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "lags_sequence": [1, 2, 3],
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


def _series() -> dict[str, Any]:
    past = 16 + 3
    return {
        "past_values": torch.rand(BATCH, past),
        "past_time_features": torch.rand(BATCH, past, 2),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.rand(BATCH, 6),
        "future_time_features": torch.rand(BATCH, 6, 2),
    }


hub(
    "time-series-transformer",
    "TimeSeriesTransformerConfig",
    "TimeSeriesTransformerForPrediction",
    _SERIES,
    _series,
)
hub("informer", "InformerConfig", "InformerForPrediction", _SERIES, _series)
hub(
    "autoformer",
    "AutoformerConfig",
    "AutoformerForPrediction",
    _SERIES,
    _series,
    label_length=4,
    moving_average=5,
)
hub(
    "patchtst",
    "PatchTSTConfig",
    "PatchTSTForPrediction",
    {},
    lambda: {"past_values": torch.randn(BATCH, 32, 3), "future_values": torch.randn(BATCH, 8, 3)},
    num_input_channels=3,
    context_length=32,
    patch_length=4,
    patch_stride=4,
    prediction_length=8,
    d_model=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=32,
)
hub(
    "patchtsmixer",
    "PatchTSMixerConfig",
    "PatchTSMixerForPrediction",
    {},
    lambda: {"past_values": torch.randn(BATCH, 32, 3), "future_values": torch.randn(BATCH, 8, 3)},
    context_length=32,
    prediction_length=8,
    patch_length=4,
    patch_stride=4,
    num_input_channels=3,
    d_model=8,
    num_layers=2,
)
