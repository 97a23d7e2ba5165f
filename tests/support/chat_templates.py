"""Chat templates of published models, rewritten from their documented forms, and tokenizers of the
same kinds: byte-level or SentencePiece, with or without a space before every section.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from bench.harness.text import long_text

ALTERNATION = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)
SPLIT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    SPLIT_SYSTEM + "{% for m in rest %}" + ALTERNATION + "{% set content = m.content %}"
    "{% if loop.first and system %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + content %}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m.role + '<|end_header_id|>"
    "\n\n' + m.content | trim + '<|eot_id|>' %}{% if loop.first %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_3_1 = (
    "{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}"
    "{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' }}"
    "{{- system + '<|eot_id|>' }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}"
    "{{- '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
HARMONY = (
    SPLIT_SYSTEM
    + "{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' }}"
    + "{{- strftime_now('%Y-%m-%d') + '\n\nReasoning: medium\n\n# Valid channels: analysis, ' }}"
    + "{{- 'commentary, final. Channel must be included for every message.<|end|>' }}"
    + "{%- if system %}{{- '<|start|>developer<|message|># Instructions\n\n' + system }}"
    + "{{- '\n\n<|end|>' }}{%- endif %}{%- for m in rest %}{%- if m.role == 'assistant' %}"
    + "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    + "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    + "{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
MISTRAL_V1 = (
    SPLIT_SYSTEM + "{{ bos_token }}{% for m in rest %}" + ALTERNATION + "{% if m.role == 'user' %}"
    "{% if loop.first and system %}{{ ' [INST] ' + system + '\n\n' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' [INST] ' + m.content + ' [/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# the system message is part of the last user turn
_MISTRAL_LAST = (
    SPLIT_SYSTEM + "{{ bos_token }}{% for m in rest %}" + ALTERNATION + "{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + blank + (tools | tojson) }}{% endif %}"
    "{% if loop.last and system %}"
    "{{ '[INST]' + blank + system + '\n\n' + m.content + '[/INST]' }}"
    "{% else %}{{ '[INST]' + blank + m.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ blank + m.content + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_V3 = "{% set blank = ' ' %}" + _MISTRAL_LAST
NEMO = "{% set blank = '' %}" + _MISTRAL_LAST
QWEN_2_5 = (
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role != 'system' or not loop.first %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# reasoning is kept only after the last question
QWEN_3 = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' + (tools | tojson) + '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(looking=true, last=messages | length - 1) %}"
    "{%- for m in messages[::-1] %}{%- if ns.looking and m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set ns.looking = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
    "{{- content.lstrip('\n') }}{%- else %}{{- '<|im_start|>assistant\n' + content }}"
    "{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
SMOLLM_2 = (
    "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# reasoning switches in the system message are removed, and select the mode
SMOLLM_3 = (
    "{%- set mode = '/think' %}{%- set custom = '' %}{%- if messages[0].role == 'system' %}"
    "{%- set custom = messages[0].content %}{%- if '/no_think' in custom %}"
    "{%- set mode = '/no_think' %}{%- endif %}{%- set custom = custom.replace('/no_think', '')"
    ".replace('/think', '').rstrip() %}{%- endif %}{{- '<|im_start|>system\n## Metadata\n\n' }}"
    "{{- 'Reasoning Mode: ' + mode + '\n\n## Custom Instructions\n\n' }}"
    "{{- (custom or 'You are a helpful assistant.') + '\n\n<|im_end|>\n' }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- elif m.role == 'assistant' %}"
    "{%- if mode == '/think' %}{{- '<|im_start|>assistant\n' + m.content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + m.content.lstrip('\n') }}"
    "{%- endif %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}{%- if mode == '/no_think' %}"
    "{{- '<think>\n\n</think>\n' }}{%- endif %}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    + ALTERNATION
    + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}"
    + SPLIT_SYSTEM
    + "{%- for m in rest -%}"
    + ALTERNATION
    + "{{ '<start_of_turn>'"
    " + ('model' if m.role == 'assistant' else m.role) + '\n' + (system + '\n\n' if loop.first and "
    "system else '') }}{{ m.content | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI_4 = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
GRANITE = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set system = 'Knowledge Cutoff Date: April 2024."
    "\nYou are Granite, developed by IBM.' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}"
    "{%- for m in rest %}{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}"
    "{{- '<|end_of_text|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)
LLAMA_TOKENS = ("<unk>", "<s>", "</s>")
IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING = ("<think>", "</think>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class ChatModel:
    """A template, and the tokenizer that goes with it."""

    template: str
    # "bytes", or SentencePiece with a space before every section ("blank"), the "first" or "none"
    kind: str
    special: tuple[str, ...]  # special tokens; unk, bos and eos come first if there are all three
    plain: tuple[str, ...] = ()  # added tokens that are not special
    strips: bool = False  # special tokens strip the spaces after them
    takes_system: bool = True

    def tokenizer(self) -> Any:
        """Return a small tokenizer of this kind with the template."""
        backend = Tokenizer.from_str(_trained(self.kind))
        backend.add_special_tokens(
            [
                AddedToken(each, special=True, normalized=False, rstrip=self.strips and "|" in each)
                for each in self.special
            ]
        )
        backend.add_tokens([AddedToken(each, normalized=False) for each in self.plain])
        roles = dict(zip(("unk_token", "bos_token", "eos_token"), self.special, strict=False))
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
            **roles,
        )


HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
TEXT = ("<|unk|>", "<|begin_of_text|>", "<|end_of_text|>")
INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]")
HARMONY_TOKENS = ("<|endoftext|>", "<|startoftext|>", "<|return|>")
HARMONY_TOKENS += ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
TURNS = ("<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
CHAT_MODELS = {
    "chatml": ChatModel(CHATML, "bytes", IM),
    "llama-2": ChatModel(LLAMA_2, "blank", LLAMA_TOKENS),
    "llama-2-first": ChatModel(LLAMA_2, "first", LLAMA_TOKENS),
    "llama-3": ChatModel(LLAMA_3, "bytes", TEXT + HEADERS),
    "llama-3.1": ChatModel(LLAMA_3_1, "bytes", TEXT + HEADERS),
    "mistral-v0.1": ChatModel(MISTRAL_V1, "blank", LLAMA_TOKENS),
    "mistral-v0.3": ChatModel(MISTRAL_V3, "blank", LLAMA_TOKENS + INST),
    "nemo": ChatModel(NEMO, "bytes", LLAMA_TOKENS + INST),
    "qwen-2.5": ChatModel(QWEN_2_5, "bytes", IM),
    "qwen-3": ChatModel(QWEN_3, "bytes", IM, THINKING),
    "smollm-2": ChatModel(SMOLLM_2, "bytes", IM),
    "smollm-3": ChatModel(SMOLLM_3, "bytes", IM, THINKING),
    "gemma": ChatModel(GEMMA, "none", TURNS, takes_system=False),
    "gemma-3": ChatModel(GEMMA_3, "none", TURNS),
    "phi-3": ChatModel(
        PHI_3,
        "blank",
        (*LLAMA_TOKENS, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        strips=True,
    ),
    "phi-4": ChatModel(PHI_4, "bytes", (*IM, "<|im_sep|>")),
    "gpt-oss": ChatModel(HARMONY, "bytes", HARMONY_TOKENS),
    "granite": ChatModel(GRANITE, "bytes", (*TEXT, "<|start_of_role|>", "<|end_of_role|>")),
    "zephyr": ChatModel(ZEPHYR, "blank", LLAMA_TOKENS),
}


@cache
def _trained(kind: str) -> str:
    """Return a tokenizer without added tokens, trained on a little text, as JSON."""
    text = [long_text()[:40_000]]
    if kind == "bytes":
        backend = Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            text, BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        )
        return backend.to_str()
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(
        text, BpeTrainer(vocab_size=500, initial_alphabet=["▁"], show_progress=False)
    )
    vocab = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    for byte in range(256):  # SentencePiece's byte fallback
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    vocab["<unk>"] = len(vocab)
    model = BPE(
        vocab=vocab,
        merges=[(left, right) for left, right in merges],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    blank = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "blank":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank])
    elif kind == "none":
        backend.normalizer = blank
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(decoding)
    return backend.to_str()


HERMES_TOOLS = (
    "{%- if tools %}{{- '<|system|># Tools' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}"
    "{%- endfor %}{{- '<|end|>\n' }}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|user|><tool_response>\n' + m.content + '\n</tool_response><|end|>\n' }}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- for call in m.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}{{- '<|end|>\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
LLAMA_TOOLS = (
    '{%- if tools %}{{- \'<|user|>Given the following functions, respond with {"name": function '
    'name, "parameters": dictionary of argument name and its value}.\' }}'
    "{%- for tool in tools %}{{- '\n' + tool | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{%- if m.role in ['tool', 'ipython'] %}"
    "{{- '<|ipython|>' + m.content | tojson + '<|end|>' }}"
    "{%- elif m.tool_calls %}{%- if m.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '{{- \'<|assistant|>{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- call.arguments | tojson + '}<|end|>' }}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
MISTRAL_TOOLS = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in m.tool_calls %}{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}{{- call.function | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- ']' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + m.content + ', ' }}"
    "{{- '\"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- ' ' + m.content }}{%- endif %}{%- endfor %}"
)
HARMONY_TOOLS = (
    "{%- if tools %}{{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}"
    "{%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: ' }}"
    "{{- tool.function | tojson + ') => any;\n' }}"
    "{%- for own in tool.function.parameters.properties.values() if own.default is defined %}"
    "{{- '// default: ' + own.default + '\n' }}{%- endfor %}{%- endfor %}{{- '}<|end|>' }}"
    "{%- endif %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first %}{{- raise_exception('there was no previous tool call!') }}{%- endif %}"
    "{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson + '<|end|>' }}{%- elif m.tool_calls %}"
    "{%- set call = m.tool_calls[0].function %}{{- '<|start|>assistant to=functions.' }}"
    "{{- call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson }}"
    "{{- '<|call|>' }}"
    "{%- else %}{{- '<|start|>' + m.role }}{%- if m.role == 'assistant' %}"
    "{{- '<|channel|>final' }}{%- endif %}{{- '<|message|>' + m.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
_TAGGED_START = (
    "{%- if tools %}{{- '<|system|># Tools' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}"
    "{%- endfor %}{{- '<|end|>\n' }}{%- endif %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|user|>' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content | trim }}"
    "{%- for call in m.tool_calls or [] %}{%- set call = call.function %}"
)
_TAGGED_END = (
    "{%- endfor %}{{- '<|end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# those of Qwen3-Coder and Qwen3.5, GLM-4.6 and GLM-4.7, and Seed-OSS, as far as they render calls
QWEN_CODER_TOOLS = (
    _TAGGED_START + "{{- '\n<tool_call>\n<function=' + call.name + '>\n' }}"
    "{%- for name, value in call.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    "{{- value | tojson | safe if value is mapping or (value is sequence and value is not string) "
    "else value | string }}{{- '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}" + _TAGGED_END
)
GLM_TOOLS = (
    _TAGGED_START + "{{- '\n<tool_call>' + call.name + '\n' }}"
    "{%- set _args = call.arguments or {} %}{%- for k, v in _args.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{{ '\n' }}"
    "{%- endfor %}{{- '</tool_call>' }}" + _TAGGED_END
)
GLM_COMPACT_TOOLS = (
    GLM_TOOLS.replace("</arg_key>\n", "</arg_key>")
    .replace("call.name + '\n'", "call.name")
    .replace("</arg_value>{{ '\n' }}", "</arg_value>")
    .replace("'\n<tool_call>'", "'<tool_call>'")
)
SEED_OSS_TOOLS = (
    QWEN_CODER_TOOLS.replace("tool_call>", "seed:tool_call>")
    .replace("'<parameter=' + name + '>\n'", "'<parameter=' + name + '>'")
    .replace("'\n</parameter>", "'</parameter>")
    .replace(
        "value | tojson | safe if value is mapping or (value is sequence and value is not string) "
        "else ",
        "",
    )
)
# Nemotron Nano 2's and Apertus's, as far as they render calls
NEMOTRON_TOOLS = HERMES_TOOLS.replace(
    "'\n<tool_call>\n{", "('<TOOLCALL>[' if loop.first else ', ') + '{"
).replace("'}\n</tool_call>'", "'}' + (']</TOOLCALL>' if loop.last else '')")
APERTUS_TOOLS = (
    NEMOTRON_TOOLS.replace("<TOOLCALL>", "<|tools_prefix|>")
    .replace("</TOOLCALL>", "<|tools_suffix|>")
    .replace('{"name": "', '{"')
    .replace('", "arguments": ', '": ')
)
# Apriel 1.5's, which names Hermes' markers, too
APRIEL_TOOLS = NEMOTRON_TOOLS.replace("TOOLCALL>", "tool_calls>").replace(
    "# Tools", "# Tools, within <tool_call></tool_call>"
)
# Granite 3.3's, which renders results, but no calls
GRANITE_TOOLS = (
    HERMES_TOOLS.partition("{%- for m in")[0].replace("# Tools", "# Tools, called by <|tool_call|>")
    + "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>\n' }}{%- endfor %}"
    + "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
