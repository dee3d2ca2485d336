"""Models of transformers, in small sizes, as they come but for a wrapper that returns the loss."""

from functools import partial

import torch
from torch import nn

from zoo.entry import ROWS, Entry, adamw, cut, tokens
from zoo.packages import prepare_torchvision

prepare_torchvision()

from transformers import (  # noqa: E402
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 64
WIDTH = 32
LENGTH = 12
FRAMES = 16
"""Frames of sound after Whisper's second convolution, which halves them."""

LAYERS_OF_32 = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_ONE = {**LAYERS_OF_32, "num_hidden_layers": 1}
_DECODER = {**_ONE, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_CODER = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    **{f"{half}_layers": 1 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 64 for half in ("encoder", "decoder")},
}
WHISPER = {
    **_CODER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_mel_bins": 8,
    "max_source_positions": FRAMES,
    "max_target_positions": 32,
}


class Loss(nn.Module):
    """The loss that a model of transformers computes from its labels."""

    def __init__(self, network, first="input_ids"):
        super().__init__()
        self.network = network
        self._first = first

    def forward(self, data, labels):
        """Return the loss."""
        return self.network(**{self._first: data}, labels=labels).loss


def _gpt2():
    return Loss(GPT2LMHeadModel(GPT2Config(**GPT2)))


def _llama():
    return Loss(LlamaForCausalLM(LlamaConfig(**{**_DECODER, "num_hidden_layers": 2})))


def _qwen2():
    return Loss(Qwen2ForCausalLM(Qwen2Config(**_DECODER)))


def _qwen3():
    return Loss(Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=8)))


def _mixtral(experts):
    words = {} if experts is None else {"experts_implementation": experts}
    return Loss(MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4, **words)))


def _bert():
    return Loss(BertForMaskedLM(BertConfig(**_ONE)))


def _t5():
    return Loss(T5ForConditionalGeneration(T5Config(**T5, num_layers=1)))


def _bart():
    return Loss(BartForConditionalGeneration(BartConfig(**_CODER, max_position_embeddings=32)))


def _whisper():
    return Loss(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)), "input_features")


def _sound(generator):
    labels = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return torch.randn(ROWS, 8, 2 * FRAMES, generator=generator), labels


_LOOP_OVER_VALUES = dict.fromkeys(
    ("semi_auto", "hsdp level1", "hsdp level3", "tensor parallel", "pipeline"), "depends on a tensor's values"
)
"""What is refused of a loop over the experts that some token has chosen."""

_language = partial(Entry, batch=tokens(VOCABULARY, LENGTH), source="transformers")

_llama_cut = cut(columns=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), inputs=("o_proj", "down_proj"))
_mixtral_cut = cut(columns=("q_proj", "k_proj", "v_proj"), inputs=("o_proj",))
_bart_cut = cut(columns=("q_proj", "k_proj", "v_proj", "fc1"), inputs=("out_proj", "fc2"))
_bert_cut = cut(columns=("query", "key", "value", "intermediate.dense"), inputs=("attention.output.dense",))

ENTRIES = [
    _language("GPT-2", _gpt2, optimizer=adamw, draws=True, cut=cut(columns=("lm_head",))),
    _language("Llama", _llama, optimizer=adamw, cut=_llama_cut),
    _language("Qwen2", _qwen2, cut=_llama_cut),
    _language("Qwen3", _qwen3, cut=_llama_cut),
    _language("Mixtral", partial(_mixtral, None), cut=_mixtral_cut),
    _language("Mixtral, eager experts", partial(_mixtral, "eager"), cut=_mixtral_cut, refused=_LOOP_OVER_VALUES),
    _language("Mixtral, batched experts", partial(_mixtral, "batched_mm"), cut=_mixtral_cut),
    _language("BERT", _bert, draws=True, cut=_bert_cut),
    _language("T5", _t5, draws=True, cut=cut(columns=(".q", ".k", ".v", ".wi"), inputs=(".o", ".wo"))),
    _language("BART", _bart, draws=True, cut=_bart_cut),
    _language("Whisper", _whisper, batch=_sound, cut=_bart_cut),
]
