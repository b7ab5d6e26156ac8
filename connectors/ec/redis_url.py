"""Where Redis is and how to log in: the options of `ECRedisConnector` about it, read and checked.

    redis://[user[:password]@]host[:port][/db]                  rediss://…            with TLS
    unix://[user[:password]@]/path/of/socket[?db=n]
    redis+sentinel://[…@]host[:port][,host[:port]…]/service[/db]    rediss+sentinel://…   with TLS, to sentinels too
    redis+cluster://[…@]host[:port][,host[:port]…]                  rediss+cluster://…    with TLS

No error names a password, nor a URL that may hold one.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from connectors.options import EC_EXTRA
from core.errors import ConfigError

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_MAX_URL_CHARS = 4096
_MAX_SECRET_BYTES = 4096
_MAX_SERVERS = 32
_MAX_DB = 65535
_PORTS = {"sentinel": 26379}
_DEFAULT_PORT = 6379
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
_SERVICE = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Address(msgspec.Struct, frozen=True):
    """A TCP address."""

    host: str
    port: int


class Login(msgspec.Struct, frozen=True):
    """An ACL user; without a name the default one."""

    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        return f"Login(username={self.username!r}, password={'***' if self.password else None})"


class RedisLocation(msgspec.Struct, frozen=True):
    """What a URL says. One of `path`, or `addresses`, is set."""

    kind: str  # "single", "sentinel" or "cluster"
    addresses: tuple[Address, ...] = ()
    path: str | None = None
    tls: bool = False
    service: str = ""  # the master's name in Sentinel
    db: int = 0
    login: Login = Login()


def refuse_secrets(extra: Mapping[str, Any]) -> None:
    """To be called before anything else looks at the extra config, since errors show values. Raises ConfigError for a
    password where none belongs and for a URL that is not text."""
    for key in extra:
        if "password" in key and not key.endswith(("password_file", "password_env")):
            reason = "a password is given by password_file, password_env or the URL"
            raise ConfigError(f"{EC_EXTRA} {key}", "***", reason)
    if not isinstance(extra.get("url", ""), str):
        raise ConfigError(f"{EC_EXTRA} url", "***", "is to be text")


def parse_url(url: str) -> RedisLocation:
    """Raises ConfigError, which shows no more than the scheme."""

    def refuse(reason: str) -> ConfigError:
        scheme = url.partition("://")[0]
        return ConfigError(f"{EC_EXTRA} url", f"{scheme}://***" if scheme in _SCHEMES else "***", reason)

    if len(url) > _MAX_URL_CHARS:
        raise refuse(f"is longer than {_MAX_URL_CHARS} characters")
    if not url.isprintable() or " " in url:
        raise refuse("has blanks or control characters in it")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise refuse("is not a URL") from None
    if parts.scheme not in _SCHEMES:
        raise refuse(f"begins with none of {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    if parts.fragment:
        raise refuse("has a part after '#'; in a password, that is %23")
    login, hosts = _split_login(parts)
    if parts.scheme == "unix":
        if hosts or not parts.path.startswith("/"):
            raise refuse("is to be unix:///path/of/socket")
        found = re.fullmatch(r"(?:db=(\d{1,5}))?", parts.query)
        if found is None:
            raise refuse("has parameters other than db")
        return RedisLocation("single", path=unquote(parts.path), db=_db(found[1] or "0", refuse), login=login)
    if parts.query:
        raise refuse("has parameters; what they could say are options of their own")
    scheme, _, kind = parts.scheme.partition("+")
    kind = kind or "single"
    addresses = tuple(_address(text, _PORTS.get(kind, _DEFAULT_PORT), refuse) for text in hosts.split(","))
    if len(addresses) > (1 if kind == "single" else _MAX_SERVERS):
        raise refuse(f"names too many servers; at most {_MAX_SERVERS} with +sentinel or +cluster, else one")
    segments = [unquote(segment) for segment in parts.path.split("/")[1:] if segment]
    service = ""
    if kind == "sentinel":
        if not segments or not _SERVICE.fullmatch(segments[0]):
            raise refuse("is to name the service that the sentinels watch: redis+sentinel://host,host/service")
        service = segments.pop(0)
    if len(segments) > 1 or (segments and kind == "cluster"):
        raise refuse("has more in its path than it may: a cluster has no databases, others one number")
    db = _db(segments[0] if segments else "0", refuse)
    return RedisLocation(kind, addresses, None, scheme == "rediss", service, db, login)


def read_password(file_option: str, file: str | None, env_option: str, env: str | None) -> str | None:
    """The password in a file or in an environment variable, without the line's end; None where neither is given."""
    if file is not None and env is not None:
        raise ConfigError(f"{EC_EXTRA} {file_option}", file, f"is given beside {env_option}; one is enough")
    if env is not None:
        password = os.environ.get(env, "").rstrip("\r\n")  # a Secret made of a file brings the file's last one
        if not password:
            raise ConfigError(f"{EC_EXTRA} {env_option}", env, "no such environment variable, or it is empty")
        return password
    if file is None:
        return None
    try:
        with open(file, "rb") as opened:
            raw = opened.read(_MAX_SECRET_BYTES + 1)
        password = raw.decode().rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not text in UTF-8"
        raise ConfigError(f"{EC_EXTRA} {file_option}", file, f"cannot be read: {reason}") from None
    if not password or len(raw) > _MAX_SECRET_BYTES:
        raise ConfigError(f"{EC_EXTRA} {file_option}", file, f"is empty or longer than {_MAX_SECRET_BYTES} bytes")
    return password


def tls_context(ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """For TLS 1.2 or later, with host names checked; `ca_file` alone is trusted where it is given, else the system's
    authorities. Raises ConfigError for a file that cannot be used."""
    for option, file in (("tls_ca_file", ca_file), ("tls_cert_file", cert_file), ("tls_key_file", key_file)):
        try:
            if file is not None:
                with Path(file).open("rb"):
                    pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "is not a path"
            raise ConfigError(f"{EC_EXTRA} {option}", file, f"cannot be read: {reason}") from None
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError):
        raise ConfigError(f"{EC_EXTRA} tls_ca_file", ca_file, "holds no certificate in PEM") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if key_file is not None and cert_file is None:
        raise ConfigError(f"{EC_EXTRA} tls_key_file", key_file, "is given without tls_cert_file")
    if cert_file is not None:
        try:
            # Without the last argument OpenSSL would ask for the pass phrase of an encrypted key on the terminal.
            context.load_cert_chain(cert_file, key_file, password=lambda: b"")
        except (OSError, ValueError):
            reason = "and its key cannot be used: not PEM, not a pair, or the key is encrypted"
            raise ConfigError(f"{EC_EXTRA} tls_cert_file", cert_file, reason) from None
    return context


def _split_login(parts: SplitResult) -> tuple[Login, str]:
    credentials, at, hosts = parts.netloc.rpartition("@")
    if not at:
        return Login(), hosts
    username, _, password = credentials.partition(":")
    return Login(unquote(username) or None, unquote(password) or None), hosts


def _address(text: str, default_port: int, refuse: Any) -> Address:
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d{1,5}))?", text)
    plain = re.fullmatch(r"([^:\[\]]+)(?::(\d{1,5}))?", text)
    found = bracketed or plain
    if found is None or not _HOST.fullmatch(found[1]):
        raise refuse("is to have host or host:port after '//', with an IPv6 address in brackets")
    port = int(found[2]) if found[2] else default_port
    if not 0 < port < 65536:
        raise refuse("has a port that is not between 1 and 65535")
    return Address(found[1], port)


def _db(text: str, refuse: Any) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > _MAX_DB:
        raise refuse(f"has a database that is not a number up to {_MAX_DB}")
    return int(text)
