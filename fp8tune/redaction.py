"""Passwords are neither stored nor printed: this module alone knows where a text may hold one.

A database URL holds one after its user's name (``postgresql://user:PASSWORD@host``) or in its query
(``?password=PASSWORD``). A driver may repeat either, decoded or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
"""Replacement of a password."""

_SHORTEST = 3  # characters: shorter ones cannot be told from the words around them

_OPTION = re.compile(r"(?=\s--[a-z])")
_URL = re.compile(r"\w[\w+.\-]*:/")  # a path made of a URL has one slash left
_USER_INFO = re.compile(r"(:/+[^:/@?\s]*:)(.*)@", re.DOTALL)  # to the last @: an unquoted password may hold some
_PARAMETER = re.compile(r"([?&])([^=&?\s]+)=([^&]*)")
_SECRET_NAME = re.compile(r"pass(?!file)|pwd|secret|token", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return a command line, message or URL without the passwords of URLs in it.

    Hides too much rather than too little: up to the last ``@`` and to the end, but not beyond the next ``--option``.
    """
    return "".join(map(_redacted_argument, _OPTION.split(text))) if ":/" in text else text


def command_line(arguments: Iterable[str]) -> str:
    """Return the program's command line as it may be stored. No argument is cut short: each is redacted alone."""
    return " ".join(["fp8tune", *map(_redacted_argument, arguments)])


def passwords(url: str) -> frozenset[str]:
    """Return every spelling of the passwords in a URL by which a driver may name them."""
    secrets = [match[2] for match in _USER_INFO.finditer(url)]
    secrets += [part for password in secrets for part in password.split("@")]  # the rest counts as the host's name
    query = url.partition("?")[2]
    secrets += [match[3] for match in _PARAMETER.finditer(f"?{query}") if _is_secret(match[2])]
    secrets += [value for name, value in parse_qsl(query) if _is_secret(name)]
    spellings = (spell(text) for text in secrets for spell in (str, unquote, unquote_plus, quote, quote_plus))
    return frozenset(text for text in spellings if len(text) >= _SHORTEST)


def without(secrets: Iterable[str], text: str) -> str:
    """Return a text without these words, the longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _redacted_argument(argument: str) -> str:
    url = _URL.search(argument)
    if url is None:
        return argument
    before, rest = argument[: url.start()], argument[url.start() :]
    rest = _USER_INFO.sub(lambda match: f"{match[1]}{HIDDEN}@", rest)
    return before + _PARAMETER.sub(
        lambda match: f"{match[1]}{match[2]}={HIDDEN}" if _is_secret(match[2]) else match[0], rest
    )


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(unquote_plus(name)) is not None
