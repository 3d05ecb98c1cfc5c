"""Promise: what carries a secret's name, stands in an address, or holds a known secret's value in any form is hidden."""

from __future__ import annotations

import base64
import html
import json
import re
from urllib.parse import quote

from mmkv_bench.secrecy import REDACTED, known_secrets, without_secrets
from tests.each import each

SECRET = 's3cr3t-kE+y/ä"\\x1234'
NAMES = ("api_key", "api-key", "X-Api-Key", "Authorization", "private_key", "hf_token", "passphrase", "client_secret")
WORDS = ("key", "num_key_value_heads", "max_new_tokens", "tokens", "bypass_rate", "path")
VARIABLES = ("JUDGE_KEY", "OPENAI_API_KEY_2", "PGPASSWORD", "DB_PWD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")


def test_values_below_a_secrets_name_are_hidden_and_others_are_not():
    hidden = without_secrets(dict.fromkeys(NAMES, SECRET) | {"api_keys": [SECRET, "two"]}, [])
    assert set(hidden.pop("api_keys")) == {REDACTED} == set(hidden.values())
    kept = dict.fromkeys(WORDS, "eight characters")
    assert without_secrets(kept, []) == kept


@each(
    "form",
    [
        str,
        repr,
        json.dumps,
        quote,
        html.escape,
        lambda text: re.sub("%..", lambda found: found[0].lower(), quote(text)),
        lambda text: repr(text.encode()),
        lambda text: json.dumps(json.dumps(text)),
        lambda text: json.dumps(text, ensure_ascii=False),
        lambda text: base64.b64encode(f"user:{text}".encode()).decode(),
        lambda text: text.encode().hex(),
    ],
)
def test_a_known_secret_is_hidden_however_it_is_written(form):
    shown = without_secrets(f"before {form(SECRET)} after", [SECRET])
    assert REDACTED in shown and "1234" not in shown and shown.startswith("before ") and shown.endswith(" after")


def test_addresses_lose_passwords_and_keys_and_nothing_else():
    shown = without_secrets("see https://me:pw@host:8000/v1?model=x&api-key=abc&sort=key#end, http://host:80/a@b", [])
    assert shown == f"see https://{REDACTED}@host:8000/v1?model=x&api-key={REDACTED}&sort=key#end, http://host:80/a@b"


def test_variables_are_secret_by_their_names(monkeypatch):
    for number, name in enumerate(VARIABLES):
        monkeypatch.setenv(name, f"value-{number}")
    monkeypatch.setenv("PWD", "/a/folder")
    monkeypatch.setenv("OLDPWD", "/another/folder")
    assert {f"value-{number}" for number in range(len(VARIABLES))} <= set(known_secrets())
    assert not {"/a/folder", "/another/folder"} & set(known_secrets())
