import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
from p2pshard_node.gateway.templates import TemplateRenderer, render

from p2pshard.errors import InvalidRequest
from tests.fake_driver import TEMPLATE

CHAT = [{"role": "user", "content": "What is <b>2+2</b>?"}]
LONGER = [
    {"role": "system", "content": "Be short."},
    *CHAT,
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": " And\n3+3? 世界 "},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

# Templates as published with well-known models, cut to what chats of text reach.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    "        {%- set date_string = strftime_now('%d %b %Y') %}\n    {%- else %}\n"
    "        {%- set date_string = '26 Jul 2024' %}\n    {%- endif %}\n{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}\n{{- 'Today Date: ' + date_string + '\\n\\n' }}\n"
    "{{- system_message }}\n{{- '<|eot_id|>' }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
GEMMA = (
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- set first_user_prefix = "
    "messages[0]['content'] + '\n\n' -%}\n    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n"
    "    {%- set first_user_prefix = '' -%}\n    {%- set loop_messages = messages -%}\n{%- endif -%}\n"
    "{%- for message in loop_messages -%}\n    {%- if (message['role'] == 'assistant') -%}\n"
    "        {%- set role = 'model' -%}\n    {%- else -%}\n        {%- set role = message['role'] -%}\n    {%- endif -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n    {%- endif -%}\n"
    "    {{ '<end_of_turn>\n' }}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n"
    "    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n"
)
GENERATION = (
    "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n    {% generation %}{{ m.content }}{% endgeneration %}\n"
    "  {% else %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endif %}\n{% endfor %}"
)
CONTROLS = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n }}{{ unk_token }}"
)
TEMPLATES = {
    "tiny": TEMPLATE,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "generation": GENERATION,
    "controls": CONTROLS,
}


def transformers_render(
    template: str, messages: list[dict[str, str]], variables: dict[str, str], prompt: bool
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=prompt, **variables
    )
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendered_as_transformers_does(name: str, prompt: bool) -> None:
    for messages in (CHAT, LONGER):
        expected = transformers_render(TEMPLATES[name], messages, VARIABLES, prompt)
        assert render(TEMPLATES[name], messages, VARIABLES, prompt) == expected


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    ["smollm2-135m-instruct", pytest.param("qwen2.5-coder-1.5b-instruct", marks=pytest.mark.slow)],
)
def test_real_models_as_transformers_apply_chat_template(name: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from tests.unit.text_models import text_model

    ours = text_model(name)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(ours._tokenizer.to_str()),
        chat_template=ours.chat_template,
        **ours.special_tokens,
    )
    for messages in (CHAT, LONGER):
        text = render(ours.chat_template, messages, ours.special_tokens)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert ours.encode_rendered(text, 4096) == expected


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    one = TemplateRenderer(limit_s=2.0)
    yield one
    one.close()


async def test_the_child_renders_the_same(renderer: TemplateRenderer) -> None:
    for template in TEMPLATES.values():
        assert await renderer.render(template, LONGER, VARIABLES) == render(template, LONGER, VARIABLES)


async def test_a_refusal_has_the_templates_own_words(renderer: TemplateRenderer) -> None:
    twice = [CHAT[0], CHAT[0]]
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        await renderer.render(LLAMA2, twice, VARIABLES)
    assert caught.value.details["field"] == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 99999999999 }}",
        "{{ 'x' * 30000000 }}",
    ],
    ids=["loop", "doubling", "recursion", "repeat", "long"],
)
async def test_a_hostile_template_is_stopped_and_the_next_one_renders(
    renderer: TemplateRenderer, template: str
) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"stopped|memory|rendered"):
        await renderer.render(template, CHAT, {})
    assert time.monotonic() - started < 6
    assert await renderer.render("{{ messages[0].role }}", CHAT, {}) == "user"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'].dumps }}",
        "{% set _ = messages.append(1) %}",
        "{% include '/etc/passwd' %}",
        "{{",
    ],
)
async def test_the_sandbox_holds(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(InvalidRequest):
        await renderer.render(template, CHAT, {})


async def test_the_child_ends_with_its_renderer() -> None:
    renderer = TemplateRenderer()
    await renderer.render("x", CHAT, {})
    assert renderer._process is not None
    pid = renderer._process.pid
    await asyncio.to_thread(renderer.close)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    renderer.close()
