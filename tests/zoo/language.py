"""Models of transformers, in small sizes, as they come but for a wrapper that returns the loss."""

from functools import partial

import torch
from torch import nn

from zoo.entry import ROWS, Entry, adamw, called, columns, inputs, tokens
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

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
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
    return Loss(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32)))


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
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return Loss(BertForMaskedLM(config))


def _t5():
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return Loss(T5ForConditionalGeneration(config))


def _bart():
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    )
    return Loss(BartForConditionalGeneration(config))


def _whisper():
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Loss(WhisperForConditionalGeneration(config), "input_features")


def _sound(generator):
    labels = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return torch.randn(ROWS, 8, 2 * FRAMES, generator=generator), labels


def _cut_llama(network, rows):
    columns(called(network, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), rows)
    inputs(called(network, "o_proj", "down_proj"), rows)


def _cut_mixtral(network, rows):
    columns(called(network, "q_proj", "k_proj", "v_proj"), rows)
    inputs(called(network, "o_proj"), rows)


def _cut_gpt2(network, rows):
    columns(called(network, "lm_head"), rows)


def _cut_bert(network, rows):
    columns(called(network, "query", "key", "value", "intermediate.dense"), rows)
    inputs(called(network, "attention.output.dense"), rows)


def _cut_t5(network, rows):
    columns(called(network, ".q", ".k", ".v", ".wi"), rows)
    inputs(called(network, ".o", ".wo"), rows)


def _cut_bart(network, rows):
    columns(called(network, "q_proj", "k_proj", "v_proj", "fc1"), rows)
    inputs(called(network, "out_proj", "fc2"), rows)


_LOOP_OVER_VALUES = dict.fromkeys(
    ("semi_auto", "hsdp level1", "hsdp level3", "tensor parallel", "pipeline"), "depends on a tensor's values"
)
"""What is refused of a loop over the experts that some token has chosen."""

_language = partial(Entry, batch=tokens(VOCABULARY, LENGTH), source="transformers")

ENTRIES = [
    _language("GPT-2", _gpt2, optimizer=adamw, draws=True, cut=_cut_gpt2),
    _language("Llama", _llama, optimizer=adamw, cut=_cut_llama),
    _language("Qwen2", _qwen2, cut=_cut_llama),
    _language("Qwen3", _qwen3, cut=_cut_llama),
    _language("Mixtral", partial(_mixtral, None), cut=_cut_mixtral),
    _language("Mixtral, eager experts", partial(_mixtral, "eager"), cut=_cut_mixtral, refused=_LOOP_OVER_VALUES),
    _language("Mixtral, batched experts", partial(_mixtral, "batched_mm"), cut=_cut_mixtral),
    _language("BERT", _bert, draws=True, cut=_cut_bert),
    _language("T5", _t5, draws=True, cut=_cut_t5),
    _language("BART", _bart, draws=True, cut=_cut_bart),
    _language("Whisper", _whisper, batch=_sound, cut=_cut_bart),
]
