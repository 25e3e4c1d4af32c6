"""Chat templates: what Hugging Face templates use works, what an attacker would use does not."""

import time

import pytest

from edgekv.errors import UserError
from edgekv.generation.template import ChatTemplate

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "<b>&'\"é"}]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_chatml_as_transformers_renders_it():
    text = ChatTemplate(CHATML).render(TALK[:1])
    assert text == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "source, text",
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi</s>"),
        ("{{ messages[2]['content'] | tojson }}", "\"<b>&'\\\"é\""),
        ("{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  1,\n  2\n ]\n}'),
        ("{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role[0] }}{% if loop.last %}{% break %}{% endif %}{% endfor %}", "uu"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}", "13"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "Yes?"),
        ("{{ strftime_now('%Y') | length }}{{ tools is none }}{{ undefined_thing is defined }}", "4TrueFalse"),
        ("{% macro f(x) %}[{{ x | trim }}]{% endmacro %}{{ f(' a ') }}{{ 'a b'.split(' ')[-1] }}{{ 'abc'[::-1] }}", "[a]bcba"),
        ("{{ '-' * 10 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}", "----------310243.0"),
    ],
)  # fmt: skip
def test_what_templates_use(source, text):
    assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(TALK) == text


def test_transformers_agrees_on_its_own_renderer():
    from transformers.utils.chat_template_utils import render_jinja_template

    for source in (CHATML, "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m | tojson }}\n  {% endif %}\n{% endfor %}"):
        theirs, _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=True)
        assert ChatTemplate(source).render(TALK) == theirs[0]


def test_the_template_may_refuse_in_its_own_words():
    with pytest.raises(UserError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ ('%s' % ({}.__class__)) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ messages | map(attribute='__class__') | first }}{{ 1 / 0 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 99999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{{ " + "(" * 1000 + " }}",
        "{{ unknown_filter | nothing }}",
    ],
)  # fmt: skip
def test_what_a_stranger_would_try_is_refused_in_a_sentence(source):
    with pytest.raises(UserError, match="chat template"):
        ChatTemplate(source).render([dict(m) for m in TALK])


@pytest.mark.parametrize("reach", ["strftime_now.__code__", "self._TemplateReference__context", "messages | attr('__class__')"])
def test_what_lies_beneath_shows_nothing(reach):
    assert ChatTemplate("{{ " + reach + " }}").render(TALK) == ""


def test_an_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr("edgekv.generation.template._SECONDS", 0.3)
    loops = "{% for i in range(90000) %}" * 4 + "{% endfor %}" * 4
    start = time.monotonic()
    with pytest.raises(UserError, match="runs for more than"):
        ChatTemplate(loops).render(TALK)
    assert time.monotonic() - start < 5
